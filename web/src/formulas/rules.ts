// Rewards in one-line rules, for the sandbox. The page's Content-Security-Policy forbids running code that is typed into it.

export type Rule = (text: string) => number;
const LINE = /^([+-]?\d+(?:\.\d+)?)\s+(?:if\s+(not\s+)?(contains|starts with|ends with)\s+"([^"]*)"|if\s+(longer|shorter) than\s+(\d+)|per\s+(character|word|"([^"]+)"))$/;
export const GRAMMAR = 'NUMBER if [not] contains|starts with|ends with "TEXT"; NUMBER if longer|shorter than N; NUMBER per character|word|"TEXT"';

/** One line as a function of the text; null if it is not a rule. An empty line gives 0. */
export function readRule(line: string): Rule | null {
  const clean = line.trim().replace("−", "-");
  if (clean === "") return () => 0;
  const match = LINE.exec(clean);
  if (!match) return null;
  const [, number, not, test, text = "", than, count, unit, part = ""] = match;
  const value = Number(number);
  if (test) {
    const holds = (of: string): boolean => (test === "contains" ? of.includes(text) : test === "starts with" ? of.startsWith(text) : of.endsWith(text));
    return (of) => (holds(of) !== Boolean(not) ? value : 0);
  }
  if (than) return (of) => ((than === "longer" ? of.length > Number(count) : of.length < Number(count)) ? value : 0);
  if (unit === "character") return (of) => value * of.length;
  if (unit === "word") return (of) => value * of.split(/\s+/).filter(Boolean).length;
  return (of) => value * (of.split(part).length - 1);
}
