// Builds the page: `node build.mjs [FOLDER]`. The result depends on the sources and the pinned esbuild alone.
import { copyFileSync, mkdirSync } from "node:fs";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import { build } from "esbuild";

const here = dirname(fileURLToPath(import.meta.url));
const target = process.argv[2] ?? join(here, "..", "headrace", "view", "static");

mkdirSync(target, { recursive: true });
await build({
  absWorkingDir: here,
  entryPoints: { page: "src/main.ts" },
  outdir: target,
  bundle: true,
  minify: true,
  format: "iife", // a classic script: a page that was opened as a file may not load modules
  target: "es2022",
  charset: "ascii",
  legalComments: "none",
});
await build({ absWorkingDir: here, entryPoints: ["page.css"], outdir: target, minify: true, charset: "ascii" });
copyFileSync(join(here, "index.html"), join(target, "index.html"));
