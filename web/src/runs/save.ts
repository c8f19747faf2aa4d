// Saves a chart as a file: CSV from its numbers, PNG from the canvas, SVG drawn from the data.
import type { ChartData } from "./charts";

export function download(name: string, content: Blob): void {
  const anchor = document.createElement("a");
  anchor.href = URL.createObjectURL(content);
  anchor.download = name;
  anchor.click();
  setTimeout(() => URL.revokeObjectURL(anchor.href), 10_000);
}

const cell = (text: string): string => (/[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text);

export function toCsv(drawn: ChartData): string {
  const heads = [drawn.axis === "steps" ? "step" : drawn.axis, ...drawn.lines.map((line) => (line.name.includes(line.run) ? line.name : `${line.run} ${line.name}`))];
  const rows = drawn.x.map((at, index) => [at, ...drawn.lines.map((line) => line.own[index] ?? "")].join(","));
  return [heads.map(cell).join(","), ...rows].join("\n") + "\n";
}

export function ticks(low: number, high: number, wanted = 5): number[] {
  if (!(high > low)) return [low];
  const rough = (high - low) / wanted;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = ([1, 2, 5, 10].find((one) => one * power >= rough) ?? 10) * power;
  const found: number[] = [];
  for (let at = Math.ceil(low / step) * step; at <= high + step * 1e-9; at += step) found.push(Number(at.toPrecision(12)));
  return found;
}

const escape = (text: string): string => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll('"', "&quot;");

export function toSvg(drawn: ChartData, title: string, width = 720, height = 400): string {
  const [left, right, top, bottom] = [64, 16, 40, 36 + 18 * drawn.lines.length];
  const all = drawn.lines.flatMap((line) => line.values).filter((value): value is number => value !== null);
  const [x0, x1] = [drawn.x[0] ?? 0, Math.max(drawn.x.at(-1) ?? 1, (drawn.x[0] ?? 0) + 1)];
  let [y0, y1] = [Math.min(...all), Math.max(...all)];
  if (!(y1 > y0)) [y0, y1] = [y0 - 0.5, y1 + 0.5];
  const x = (value: number): string => (left + ((value - x0) / (x1 - x0)) * (width - left - right)).toFixed(1);
  const y = (value: number): string => (height - bottom - ((value - y0) / (y1 - y0)) * (height - top - bottom)).toFixed(1);
  const parts = [
    `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 ${width} ${height}" font-family="sans-serif" font-size="12" fill="#222">`,
    `<rect width="${width}" height="${height}" fill="#fff"/><text x="${left}" y="22" font-size="15">${escape(title)}</text>`,
  ];
  for (const at of ticks(y0, y1)) parts.push(`<path d="M${left} ${y(at)}H${width - right}" stroke="#ddd"/><text x="${left - 8}" y="${y(at)}" dy="4" text-anchor="end">${String(at).replaceAll("-", "−")}</text>`);
  for (const at of ticks(x0, x1, 7)) parts.push(`<text x="${x(at)}" y="${height - bottom + 18}" text-anchor="middle">${at}</text>`);
  drawn.lines.forEach((line, index) => {
    const points = line.values.flatMap((value, at) => (value === null ? [] : [`${x(drawn.x[at] ?? 0)} ${y(value)}`]));
    const below = height - bottom + 36 + 18 * index;
    const dash = line.dash.length ? ` stroke-dasharray="${line.dash.join(" ")}"` : "";
    parts.push(`<polyline points="${points.join(" ")}" fill="none" stroke="${line.colour}" stroke-width="1.8"${dash}/>`);
    parts.push(`<path d="M${left} ${below - 4}h24" stroke="${line.colour}" stroke-width="2"${dash}/><text x="${left + 32}" y="${below}">${escape(line.label)}</text>`);
  });
  return parts.join("\n") + "\n</svg>\n";
}
