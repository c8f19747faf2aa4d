// Formats numbers for people. A missing value is a dash.

export const DASH = "–";
const minus = (text: string): string => text.replaceAll("-", "−");

/** Negative numbers in a sentence get a real minus sign; quoted text stays as it is. */
export const tidy = (text: string): string => text.replace(/(^|\s)-(?=\d)/g, "$1−");

export function number(value: number | null | undefined, digits = 3): string {
  if (value === null || value === undefined || !Number.isFinite(value)) return DASH;
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size >= 1000) return minus(value.toLocaleString("en-GB", { maximumFractionDigits: 0 }));
  if (size < 1e-3) return minus(value.toExponential(1));
  return minus(value.toFixed(Math.min(Math.max(digits - 1 - Math.floor(Math.log10(size)), 0), 5)));
}

export const score = (value: number | null | undefined): string =>
  value === null || value === undefined ? DASH : Math.abs(value) >= 1000 ? number(value) : minus(value.toFixed(2));

export function signed(value: number | null | undefined, digits = 2): string {
  if (value === null || value === undefined || !Number.isFinite(value)) return DASH;
  const size = Math.abs(value).toFixed(digits);
  return (Number(size) === 0 ? "" : value > 0 ? "+" : "−") + size;
}

/** A value of a recipe, as it is written there. */
export const setting = (value: unknown): string => (value === undefined || value === null ? DASH : typeof value === "string" ? value : typeof value === "number" ? minus(String(value)) : JSON.stringify(value));

export const percent = (share: number | null | undefined, digits = 0): string =>
  share === null || share === undefined ? DASH : `${(100 * share).toFixed(digits)} %`;

export function duration(seconds: number | null): string {
  if (seconds === null || !Number.isFinite(seconds)) return DASH;
  const whole = Math.max(0, Math.round(seconds));
  const [hours, minutes] = [Math.floor(whole / 3600), Math.floor(whole / 60)];
  if (hours >= 24) return `${Math.floor(hours / 24)} d ${hours % 24} h`;
  const two = (n: number): string => String(n).padStart(2, "0");
  return hours ? `${hours}:${two(minutes % 60)}:${two(whole % 60)}` : `${minutes}:${two(whole % 60)}`;
}

export function ago(time: number | null): string {
  if (time === null) return DASH;
  const seconds = Math.max(0, Date.now() / 1000 - time);
  for (const [unit, name] of [[86400, "d"], [3600, "h"], [60, "min"]] as const) {
    if (seconds >= unit) return `${Math.floor(seconds / unit)} ${name} ago`;
  }
  return "just now";
}

export const plural = (count: number, one: string, many = `${one}s`): string =>
  `${count.toLocaleString("en-GB")} ${count === 1 ? one : many}`;

/** Where values from `low` to `high` lie on a track that spans `range`, as percentages from its left and right end. */
export function onTrack(low: number | null, high: number | null, range: readonly [number, number]): { left: string; right: string } {
  const width = range[1] - range[0] || 1;
  const at = (value: number): number => Math.min(100, Math.max(0, (100 * (value - range[0])) / width));
  return { left: `${at(low ?? range[0])}%`, right: `${100 - at(high ?? low ?? range[0])}%` };
}

/** The range of some values; null values don't count. */
export function rangeOf(values: (number | null)[]): [number, number] {
  const known = values.filter((value): value is number => value !== null && Number.isFinite(value));
  return known.length ? [Math.min(...known), Math.max(...known)] : [0, 1];
}
