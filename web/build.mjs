// Builds one script and one stylesheet for each page into the Python package. `make page` calls it; `npm run build` type-checks first.
//
// Each asset names the hash of the sources that it was made from; tests/unit/reports/test_page.py computes the same one.
import { createHash } from "node:crypto";
import { existsSync, readFileSync, readdirSync, writeFileSync } from "node:fs";
import { dirname, join, relative, sep } from "node:path";
import { fileURLToPath } from "node:url";
import { build } from "esbuild";

const here = dirname(fileURLToPath(import.meta.url));
const assets = join(here, "..", "src", "commlens", "reports", "page", "assets");
const pages = readdirSync(join(here, "src"), { withFileTypes: true })
  .filter((entry) => entry.isDirectory() && entry.name !== "shared")
  .map((entry) => entry.name)
  .sort();

function filesBelow(folder) {
  return readdirSync(folder, { withFileTypes: true, recursive: true })
    .filter((entry) => entry.isFile())
    .map((entry) => join(entry.parentPath, entry.name));
}

function hashOfSources(page) {
  const files = [
    ...["build.mjs", "package-lock.json", "tsconfig.json"].map((name) => join(here, name)),
    ...filesBelow(join(here, "src", "shared")),
    ...filesBelow(join(here, "src", page)),
  ];
  const hash = createHash("sha256");
  const named = files.map((file) => [relative(here, file).split(sep).join("/"), file]);
  for (const [name, file] of named.sort(([a], [b]) => (a < b ? -1 : 1))) {
    hash.update(`${name}\n${createHash("sha256").update(readFileSync(file)).digest("hex")}\n`);
  }
  return hash.digest("hex");
}

const packages = new Set();
for (const page of pages) {
  const result = await build({
    entryPoints: { [page]: join(here, "src", page, "main.tsx") },
    outdir: assets,
    bundle: true,
    minify: true,
    format: "iife",
    target: ["chrome103", "firefox113", "safari16.4"],
    charset: "utf8",
    jsx: "automatic",
    jsxImportSource: "preact",
    legalComments: "none",
    metafile: true,
    banner: { js: `/* commlens: page ${page}, built by make page from sources ${hashOfSources(page)}; licences of what it contains: LICENSES.txt */` },
    logLevel: "warning",
  });
  for (const input of Object.keys(result.metafile.inputs)) {
    const found = input.match(/node_modules\/((?:@[^/]+\/)?[^/]+)\//);
    if (found) packages.add(found[1]);
  }
}

const licences = [...packages].sort().map((name) => {
  const folder = join(here, "node_modules", name);
  const { version, license } = JSON.parse(readFileSync(join(folder, "package.json"), "utf8"));
  const file = ["LICENSE", "LICENSE.md", "LICENSE.txt"].map((each) => join(folder, each)).find(existsSync);
  if (!file) throw new Error(`${name} has no licence file`);
  return `${name} ${version} (${license})\n\n${readFileSync(file, "utf8").trim()}\n`;
});
writeFileSync(join(assets, "LICENSES.txt"), `The pages contain these packages.\n\n${licences.join(`\n${"-".repeat(80)}\n\n`)}`);
