import { svelte } from "@sveltejs/vite-plugin-svelte";
import { defineConfig, type Plugin } from "vite";

/** The fonts that our formulas use. KaTeX ships twenty, each in three formats; a current browser needs only woff2. */
const FACES = /KaTeX_(Main-Regular|Math-Italic|Size[1-4]-Regular)\.woff2/;

export function fewerFonts(): Plugin {
  return {
    name: "fewer-fonts",
    enforce: "pre",
    transform(code, id) {
      if (!/katex(\.min)?\.css/.test(id.split("?")[0] ?? "") || !code.includes("@font-face")) return null;
      return code.replace(/@font-face\s*{[^}]*}/g, (face) => {
        const source = /url\(([^)]*\.woff2)\)/.exec(face)?.[1];
        return source && FACES.test(source) ? face.replace(/src:[^;}]*/, `src: url(${source}) format("woff2")`) : "";
      });
    },
  };
}

// Everything is a separate file: the page's Content-Security-Policy allows no inline code, inline style or data: fonts.
export default defineConfig({
  // Relative addresses: the same files can be published as a static site in any folder.
  base: "./",
  plugins: [fewerFonts(), svelte()],
  build: {
    outDir: "../oncurve/studio/static",
    emptyOutDir: true,
    assetsInlineLimit: 0,
    modulePreload: { polyfill: false },
    reportCompressedSize: false,
    target: "es2022",
    rollupOptions: {
      // The formulas are a separate entry, so that a test can load only them.
      input: { index: "index.html", formulas: "src/formulas/index.ts" },
      preserveEntrySignatures: "strict",
    },
  },
  server: { proxy: { "/api": "http://127.0.0.1:8765" }, fs: { allow: [".."] } },
});
