#!/usr/bin/env bash
# Sees to it that PostgreSQL's programs are there: installs them on Debian when run as root, and
# says what is missing elsewhere. Starts no service.
set -euo pipefail

if command -v initdb >/dev/null || compgen -G '/usr/lib/postgresql/*/bin/initdb' >/dev/null; then
  exit 0
fi
if [[ $EUID -ne 0 ]] || ! command -v apt-get >/dev/null; then
  echo "missing: initdb; install PostgreSQL (Debian: apt-get install postgresql, which takes root)," >&2
  echo "or put its programs on the PATH, and run this again" >&2
  exit 1
fi

# Debian's package makes a cluster and starts it, unless it is told not to.
mkdir -p /etc/postgresql-common
config=/etc/postgresql-common/createcluster.conf
[[ -e $config ]] || echo "create_main_cluster = false" >"$config"
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -qq -y --no-install-recommends postgresql >/dev/null
