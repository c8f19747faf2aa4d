// Light, dark, or the system's setting. The choice is stored in this browser.

type Choice = "system" | "light" | "dark";
const KEY = "oncurve-theme";
const dark = matchMedia("(prefers-color-scheme: dark)");
const kept = localStorage.getItem(KEY);

export const theme = $state<{ choice: Choice; dark: boolean }>({
  choice: kept === "light" || kept === "dark" ? kept : "system",
  dark: false,
});

function apply(): void {
  theme.dark = theme.choice === "dark" || (theme.choice === "system" && dark.matches);
  document.documentElement.dataset.theme = theme.dark ? "dark" : "light";
}

export function switchTheme(): void {
  theme.choice = theme.choice === "system" ? "light" : theme.choice === "light" ? "dark" : "system";
  localStorage.setItem(KEY, theme.choice);
  apply();
}

dark.addEventListener("change", apply);
apply();
