// The router: #/page/part/part?key=value. The address says which page and which data are shown, so links can be shared and bookmarked.

export interface Place { page: string; parts: string[]; query: URLSearchParams }

function read(): Place {
  const [path = "", query = ""] = location.hash.replace(/^#\/?/, "").split("?", 2);
  const [page = "", ...parts] = path.split("/").map(decodeSafely);
  return { page: page || "runs", parts, query: new URLSearchParams(query) };
}

function decodeSafely(part: string): string {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}

export const route = $state({ place: read() });
addEventListener("hashchange", () => (route.place = read()));

export function link(page: string, parts: (string | number)[] = [], query: Record<string, string> = {}): string {
  const path = [page, ...parts].map((part) => encodeURIComponent(String(part))).join("/");
  const asked = new URLSearchParams(Object.entries(query).filter(([, value]) => value !== "")).toString();
  return `#/${path}${asked ? `?${asked}` : ""}`;
}

export function go(address: string, replace = false): void {
  if (location.hash === address) return;
  if (replace) {
    history.replaceState(null, "", address);
    route.place = read();
  } else {
    location.hash = address;
  }
}

/** Changes keys of the address's query in place; an empty value removes a key. */
export function setQuery(changes: Record<string, string>): void {
  const { page, parts, query } = read();
  go(link(page, parts, { ...Object.fromEntries(query), ...changes }), true);
}
