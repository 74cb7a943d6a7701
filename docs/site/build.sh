#!/usr/bin/env bash
# The documents as a site in target/site, every link of which is checked. Needs mdbook and python3.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
mdbook build
python3 site/check.py ../target/site
