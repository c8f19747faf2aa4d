// Writes a hash of all sources next to the built files, so that a test without Node can check that the build is current.
// tests/studio/test_static.py computes the same hash.
import { createHash } from "node:crypto";
import { readdirSync, readFileSync, writeFileSync } from "node:fs";
import { join, relative, sep } from "node:path";

const web = import.meta.dirname;
const root = join(web, "..");
const left = new Set(["node_modules"]);

function files(folder) {
  return readdirSync(folder, { withFileTypes: true })
    .filter((entry) => !left.has(entry.name))
    .flatMap((entry) => (entry.isDirectory() ? files(join(folder, entry.name)) : [join(folder, entry.name)]));
}

const sources = [...files(web), join(root, "examples", "grpo_in_50_lines.py"), join(root, "docs", "troubleshooting.md")]
  .map((path) => relative(root, path).split(sep).join("/"))
  .sort();
const hash = createHash("sha256");
for (const name of sources) {
  hash.update(name + "\n");
  hash.update(createHash("sha256").update(readFileSync(join(root, name))).digest("hex") + "\n");
}
writeFileSync(join(root, "oncurve", "studio", "static", "source.sha256"), hash.digest("hex") + "\n");
