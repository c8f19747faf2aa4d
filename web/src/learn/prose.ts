// Parses the small Markdown subset of the Learn pages into a tree. Text is never turned into HTML.

export type Inline =
  | { kind: "text" | "bold" | "em" | "code" | "math"; text: string }
  | { kind: "link"; text: string; href: string };
export type Block =
  | { kind: "heading" | "code" | "formula" | "demo" | "file"; text: string }
  | { kind: "paragraph"; inline: Inline[] }
  | { kind: "list"; ordered: boolean; items: Inline[][] }
  | { kind: "fold"; title: Inline[]; answer: Inline[] }
  | { kind: "table"; head: Inline[][]; rows: Inline[][][] };
export type Layer = "figure" | "intuition" | "mathematics" | "implementation" | "all";
export interface Section { title: string; layers: { layer: Layer; blocks: Block[] }[] }

const INLINE = /\$([^$]+)\$|`([^`]+)`|\*\*(.+?)\*\*|(?<![\\*\w])\*([^*]+)\*|\[([^\]]+)\]\(([^)]+)\)/g;

export function inline(text: string): Inline[] {
  const found: Inline[] = [];
  let from = 0;
  for (const match of text.matchAll(INLINE)) {
    if (match.index > from) found.push({ kind: "text", text: text.slice(from, match.index) });
    const [whole, math, code, bold, em, label, href] = match;
    if (math !== undefined) found.push({ kind: "math", text: math });
    else if (code !== undefined) found.push({ kind: "code", text: code });
    else if (bold !== undefined) found.push({ kind: "bold", text: bold });
    else if (em !== undefined) found.push({ kind: "em", text: em });
    else found.push({ kind: "link", text: label ?? "", href: href ?? "" });
    from = match.index + whole.length;
  }
  if (from < text.length) found.push({ kind: "text", text: text.slice(from) });
  return found;
}

/** Splits a table row into cells. A bar inside `$…$` or `…` does not separate cells. */
function cells(line: string): Inline[][] {
  return (line.trim().replace(/^\||\|$/g, "").match(/(?:\$[^$]*\$|`[^`]*`|[^|])+/g) ?? []).map((cell) => inline(cell.trim()));
}

export function read(source: string): Section {
  // A number stays on one line with its unit.
  const lines = source.replace(/(?<=\d) (?=%|GB\b)/g, "\u00a0").split("\n");
  const section: Section = { title: (lines.shift() ?? "").replace(/^# /, ""), layers: [] };
  let blocks: Block[] = [];
  for (let at = 0; at < lines.length; ) {
    const line = lines[at] ?? "";
    const layer = /^@(figure|intuition|mathematics|implementation|all)$/.exec(line)?.[1] as Layer | undefined;
    const taken = (test: (text: string) => boolean): string[] => {
      const start = at;
      while (at < lines.length && test(lines[at] ?? "")) at++;
      return lines.slice(start, at);
    };
    if (layer) {
      blocks = [];
      section.layers.push({ layer, blocks });
      at++;
    } else if (line.startsWith("@demo ") || line.startsWith("@file ")) {
      blocks.push({ kind: line.startsWith("@demo") ? "demo" : "file", text: line.slice(6) });
      at++;
    } else if (line.startsWith("@")) {
      throw new Error(`unknown mark: ${line}`);
    } else if (line.startsWith("```")) {
      at++;
      blocks.push({ kind: "code", text: taken((text) => !text.startsWith("```")).join("\n") });
      at++;
    } else if (line.startsWith("$$")) {
      blocks.push({ kind: "formula", text: line.slice(2).replace(/\$\$\s*$/, "") });
      at++;
    } else if (line.startsWith("## ")) {
      blocks.push({ kind: "heading", text: line.slice(3) });
      at++;
    } else if (line.startsWith("|")) {
      const [head = "", , ...rows] = taken((text) => text.startsWith("|"));
      blocks.push({ kind: "table", head: cells(head), rows: rows.map(cells) });
    } else if (/^(- |\d+\. )/.test(line)) {
      const ordered = !line.startsWith("-");
      const items = taken((text) => /^(- |\d+\. |  )/.test(text)).join("\n").split(/\n(?=- |\d+\. )/);
      blocks.push({ kind: "list", ordered, items: items.map((item) => inline(item.replace(/^(- |\d+\. )/, "").replace(/\n\s*/g, " "))) });
    } else if (line.startsWith("? ")) {
      at++;
      blocks.push({ kind: "fold", title: inline(line.slice(2)), answer: inline(taken((text) => text.startsWith("> ")).map((text) => text.slice(2)).join(" ")) });
    } else if (line.trim() === "") {
      at++;
    } else {
      blocks.push({ kind: "paragraph", inline: inline(taken((text) => text.trim() !== "" && !/^(@|\$\$|\||```|## |- |\? )/.test(text)).join(" ")) });
    }
  }
  return section;
}

/** A page of the documentation as a section: its links to its own headings stay, those to other pages become their names. */
export const asSection = (page: string, id: string): string =>
  page.replace("\n", "\n@all\n").replace(/\]\(#([^)]+)\)/g, `](#/learn/${id}?at=$1)`).replace(/\[([^\]]+)\]\(([\w/-]+\.md)[^)]*\)/g, "$1 (`docs/$2`)");

/** The symbols that a section's formulas mark with \htmlData{symbol=…}: they light up together with the figure. */
export const symbolsOf = (section: Section): string[] =>
  [...new Set(section.layers.flatMap(({ blocks }) => blocks.flatMap((block) => (block.kind === "formula" ? [...block.text.matchAll(/\\htmlData\{symbol=([^}]+)\}/g)].map((match) => match[1] ?? "") : []))))];

/** "When to prefer which" as "when-to-prefer-which". */
export const slug = (text: string): string => text.toLowerCase().replaceAll("'", "").replace(/[^\p{L}\d]+/gu, "-").replace(/^-|-$/g, "");

/** A paragraph that starts with bold words can be linked to by them. */
export const anchorOf = (block: Block): string | undefined => (block.kind === "paragraph" && block.inline[0]?.kind === "bold" ? slug(block.inline[0].text) : undefined);
