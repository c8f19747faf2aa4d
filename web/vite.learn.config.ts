// The Learn pages as a site of their own, in docs/learn. Browsers load no modules from a folder, so this is one classic script:
// the same files work on any host and from a disk.
import { readFileSync } from "node:fs";
import { svelte } from "@sveltejs/vite-plugin-svelte";
import { defineConfig, type Plugin } from "vite";
import { fewerFonts } from "./vite.config.ts";

function classicPage(): Plugin {
  return {
    name: "classic-page",
    generateBundle() {
      this.emitFile({ type: "asset", fileName: "index.html", source: readFileSync("learn.html", "utf8") });
    },
  };
}

export default defineConfig({
  base: "./",
  plugins: [fewerFonts(), svelte(), classicPage()],
  build: {
    outDir: "../docs/learn",
    emptyOutDir: true,
    assetsInlineLimit: 0,
    cssCodeSplit: false,
    reportCompressedSize: false,
    target: "es2022",
    rollupOptions: {
      input: "src/learn-site.ts",
      output: { format: "iife", entryFileNames: "learn.js", assetFileNames: (file) => (file.names.some((name) => name.endsWith(".css")) ? "learn.css" : "[name][extname]") },
    },
  },
});
