// Diffs by longest common subsequence: of the lines of two recipes, and of the words of two completions.

export interface DiffLine { left: string | null; right: string | null }

/** The lines of both texts, with a removed line and the one added in its place side by side. */
export const diff = (left: string[], right: string[]): DiffLine[] => paired(align(left, right));

function align(left: string[], right: string[]): DiffLine[] {
  const [rows, columns] = [left.length, right.length];
  const common = Array.from({ length: rows + 1 }, () => new Uint32Array(columns + 1));
  const at = (row: number, column: number): number => common[row]?.[column] ?? 0;
  for (let i = rows - 1; i >= 0; i--) {
    for (let j = columns - 1; j >= 0; j--) {
      const line = common[i];
      if (line) line[j] = left[i] === right[j] ? at(i + 1, j + 1) + 1 : Math.max(at(i + 1, j), at(i, j + 1));
    }
  }
  const found: DiffLine[] = [];
  let [i, j] = [0, 0];
  while (i < rows || j < columns) {
    if (i < rows && j < columns && left[i] === right[j]) found.push({ left: left[i++] ?? "", right: right[j++] ?? "" });
    else if (j >= columns || (i < rows && at(i + 1, j) >= at(i, j + 1))) found.push({ left: left[i++] ?? "", right: null });
    else found.push({ left: null, right: right[j++] ?? "" });
  }
  return found;
}

/** Puts a removed line and the line added in its place side by side. */
function paired(lines: DiffLine[]): DiffLine[] {
  const found: DiffLine[] = [];
  for (let start = 0; start < lines.length; ) {
    let end = start;
    while (end < lines.length && (lines[end]?.left === null || lines[end]?.right === null)) end++;
    const gone = lines.slice(start, end).flatMap((line) => (line.left === null ? [] : [line.left]));
    const come = lines.slice(start, end).flatMap((line) => (line.right === null ? [] : [line.right]));
    for (let k = 0; k < Math.max(gone.length, come.length); k++) found.push({ left: gone[k] ?? null, right: come[k] ?? null });
    const same = lines[end];
    if (same) found.push(same);
    start = end + 1;
  }
  return found;
}

/** A part of the right text: in both, only there, or (`gone`) only in the left text. */
export interface DiffPart { kind: "same" | "added" | "gone"; text: string }
const MOST_WORDS = 1500;

/** What changes from one text to another, word by word; null if they are too long to compare in a moment. */
export function wordDiff(left: string, right: string): DiffPart[] | null {
  const words = (text: string): string[] => text.match(/\s+|[\p{L}\p{N}]+|[^\s\p{L}\p{N}]/gu) ?? [];
  const [one, other] = [words(left), words(right)];
  if (one.length > MOST_WORDS || other.length > MOST_WORDS) return null;
  const parts: DiffPart[] = [];
  for (const { left: gone, right: added } of align(one, other)) {
    const kind = gone === null ? "added" : added === null ? "gone" : "same";
    const last = parts.at(-1);
    if (last?.kind === kind) last.text += added ?? gone ?? "";
    else parts.push({ kind, text: added ?? gone ?? "" });
  }
  return parts;
}
