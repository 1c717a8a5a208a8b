#!/usr/bin/env bash
# Sees to it that the programs of Prometheus are there: installs them on Debian when run as
# root, and says what is missing elsewhere. Starts no service.
set -euo pipefail

programs=(prometheus promtool prometheus-alertmanager amtool)
packages=(prometheus prometheus-alertmanager)

missing=()
for program in "${programs[@]}"; do
  command -v "$program" >/dev/null || missing+=("$program")
done
if [[ ${#missing[@]} -eq 0 ]]; then
  exit 0
fi
if [[ $EUID -ne 0 ]] || ! command -v apt-get >/dev/null; then
  echo "missing: ${missing[*]}; install them (Debian: apt-get install ${packages[*]}," >&2
  echo "which takes root), or put them on the PATH, and run this again" >&2
  exit 1
fi

# Debian's packages start a service that listens on every interface, unless the policy
# forbids it. One that is here already is the machine's own business.
policy=/usr/sbin/policy-rc.d
if [[ ! -e $policy ]]; then
  trap 'rm -f "$policy"' EXIT
  printf '#!/bin/sh\nexit 101\n' >"$policy"
  chmod +x "$policy"
fi
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -qq -y --no-install-recommends "${packages[@]}" >/dev/null
