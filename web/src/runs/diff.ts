// Line diff of two texts by longest common subsequence.

export interface DiffLine { left: string | null; right: string | null }

export function diff(left: string[], right: string[]): DiffLine[] {
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
  return paired(found);
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
