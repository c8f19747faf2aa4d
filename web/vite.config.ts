import { svelte } from "@sveltejs/vite-plugin-svelte";
import { defineConfig, type Plugin } from "vite";

/** The faces that our formulas use; KaTeX brings twenty, each in three formats, and a browser of today needs one. */
const FACES = /KaTeX_(Main-Regular|Math-Italic|AMS-Regular|Size[1-4]-Regular)\.woff2/;

function fewerFonts(): Plugin {
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

// Everything is a file of its own: the page's Content-Security-Policy allows no inline code, style or data: font.
export default defineConfig({
  plugins: [fewerFonts(), svelte()],
  build: {
    outDir: "../oncurve/studio/static",
    emptyOutDir: true,
    assetsInlineLimit: 0,
    modulePreload: { polyfill: false },
    reportCompressedSize: false,
    target: "es2022",
    rollupOptions: {
      // The formulas are an entry of their own, so that a test can load them by themselves.
      input: { index: "index.html", formulas: "src/formulas/index.ts" },
      preserveEntrySignatures: "strict",
    },
  },
  server: { proxy: { "/api": "http://127.0.0.1:8765" }, fs: { allow: [".."] } },
});
