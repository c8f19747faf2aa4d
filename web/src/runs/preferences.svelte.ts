// What a reader prefers to see on the Runs page, stored in this browser: pinned charts, collapsed sections, notifications.

const KEY = "oncurve-charts";
interface Preferences { pins: string[]; collapsed: string[]; notify: boolean }

function read(): Preferences {
  try {
    return { pins: [], collapsed: [], notify: false, ...(JSON.parse(localStorage.getItem(KEY) ?? "{}") as Partial<Preferences>) };
  } catch {
    return { pins: [], collapsed: [], notify: false };
  }
}

export const preferences = $state(read());
const keep = (): void => localStorage.setItem(KEY, JSON.stringify(preferences));

export function togglePin(id: string): void {
  preferences.pins = preferences.pins.includes(id) ? preferences.pins.filter((one) => one !== id) : [...preferences.pins, id];
  keep();
}

export function setCollapsed(section: string, collapsed: boolean): void {
  if (collapsed === preferences.collapsed.includes(section)) return;
  preferences.collapsed = collapsed ? [...preferences.collapsed, section] : preferences.collapsed.filter((one) => one !== section);
  keep();
}

/** Turns notifications on or off; the browser asks for permission the first time. */
export async function toggleNotify(): Promise<void> {
  preferences.notify = !preferences.notify && (Notification.permission === "granted" || (await Notification.requestPermission()) === "granted");
  keep();
}

export function notify(text: string): void {
  if (preferences.notify && Notification.permission === "granted") new Notification("Oncurve", { body: text, icon: "icon.svg" });
}
