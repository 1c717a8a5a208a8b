#!/usr/bin/env bash
# Sees to it that a browser is there, and what drives it: installs Chromium on Debian when run as
# root, and says what is missing elsewhere; $1 is the pip of the environment of the tests.
set -euo pipefail

"$1" install --quiet --constraint constraints.txt --requirement tests/web/clients.txt
if command -v chromium >/dev/null; then
  exit 0
fi
if [[ $EUID -ne 0 ]] || ! command -v apt-get >/dev/null; then
  echo "missing: chromium; install it (Debian: apt-get install chromium, which takes root)," >&2
  echo "or put it on the PATH, and run this again" >&2
  exit 1
fi
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -qq -y --no-install-recommends chromium fonts-dejavu-core >/dev/null
