#!/usr/bin/env bash
# Prints a folder that holds kube-apiserver and etcd; makes it first where it is missing.
#
# kube-apiserver is built from Debian 12's source package (about 6 minutes, once per machine), etcd
# is taken out of its Debian package. Everything comes from the Debian archive that this machine's
# apt is set up for; apt's own configuration and lists are left as they are. The result lies in
# ${OUTLAST_CACHE:-~/.cache/outlast}/kube/bin, outside any checkout; whoever has other binaries can
# put them there. What the tests start besides, kubectl and openssl, is looked for each time: a
# missing kubectl is taken out of its Debian package as well, a missing openssl is installed.
#
# Progress goes to stderr, so that stdout is the folder and nothing else.
set -euo pipefail

main() {
    local cache=${OUTLAST_CACHE:-$HOME/.cache/outlast}/kube
    mkdir -p "$cache"
    # Two test runs that start together must not build twice.
    exec 9>"$cache/lock"
    flock 9
    if [[ ! -x $cache/bin/kube-apiserver || ! -x $cache/bin/etcd ]]; then
        make_binaries "$cache" >&2
    fi
    if ! has_kubectl "$cache" || ! command -v openssl >/dev/null; then
        add_tools "$cache" >&2
    fi
    echo "$cache/bin"
}

make_binaries() {
    local cache=$1 work=$1/build
    refuse_other_systems "$cache"
    begin_work "$cache"
    install_packages golang-1.19-go rsync jq make dpkg-dev
    fetch
    [[ -x $cache/bin/kube-apiserver ]] || build_apiserver "$cache/bin"
    install -m 755 etcd/usr/bin/etcd "$cache/bin/etcd.new"
    mv "$cache/bin/etcd.new" "$cache/bin/etcd"
    cd "$cache"
    rm -rf "$work"
    say "done"
}

has_kubectl() { command -v kubectl >/dev/null || [[ -x $1/bin/kubectl ]]; }

add_tools() {
    local cache=$1
    command -v apt-get >/dev/null || fail "kubectl or openssl is missing: install them"
    begin_work "$cache"
    command -v openssl >/dev/null || install_packages openssl
    if ! has_kubectl "$cache"; then
        say "fetching kubectl"
        apt-get "${apt_options[@]}" -qq download kubernetes-client
        dpkg -x kubernetes-client_*.deb client
        install -m 755 client/usr/bin/kubectl "$cache/bin/kubectl.new"
        mv "$cache/bin/kubectl.new" "$cache/bin/kubectl"
    fi
    cd "$cache"
    rm -rf "$cache/build"
}

# In an empty folder, with the archive at hand.
begin_work() {
    # Left by a run that was interrupted.
    rm -rf "$1/build"
    mkdir -p "$1/build" "$1/bin"
    cd "$1/build"
    ask_debian_for_sources
}

# Later Debian releases cut the source package down to kubectl.
refuse_other_systems() {
    local ID='' VERSION_ID=''
    [[ ! -r /etc/os-release ]] || . /etc/os-release
    [[ $ID == debian && $VERSION_ID == 12 ]] || fail \
        "kube-apiserver can only be built on Debian 12 (here: ${ID:-unknown} ${VERSION_ID:-})." \
        "Put executables kube-apiserver (1.20 or newer) and etcd into $1/bin to run these tests."
}

# The Debian archive that this machine's packages come from, asked for sources too.
ask_debian_for_sources() {
    local key=/usr/share/keyrings/debian-archive-keyring.gpg found kind
    mkdir -p apt/known/partial apt/lists/partial apt/cache
    found=$(debian_archives)
    if [[ ! $found ]]; then
        # apt has never been updated here, as in a new container.
        say "asking all archives that apt knows what they hold"
        apt-get -o "Dir::State::lists=$PWD/apt/known" -qq update || say "some did not answer"
        found=$(debian_archives -o "Dir::State::lists=$PWD/apt/known")
    fi
    [[ $found ]] || fail "apt knows no Debian archive on this machine (see apt-get indextargets)"
    for kind in deb deb-src; do
        sed "s|^|$kind [signed-by=$key] |" <<<"$found"
    done >apt/sources.list
    apt_options=(
        -o "Dir::Etc::sourcelist=$PWD/apt/sources.list" -o Dir::Etc::sourceparts=/dev/null
        -o "Dir::State::lists=$PWD/apt/lists" -o "Dir::Cache=$PWD/apt/cache"
        # apt's own user, to whom it drops for downloads, cannot write into a home folder.
        -o APT::Sandbox::User=root -o Acquire::Retries=3
        # Another installation may be under way: wait for it rather than fail.
        -o DPkg::Lock::Timeout=600
    )
    apt-get "${apt_options[@]}" -qq update || fail "the Debian archive does not answer"
}

# As `URL SUITE COMPONENT`, a line each; options for apt-get come as arguments.
debian_archives() {
    apt-get "$@" indextargets --format '$(REPO_URI) $(RELEASE) $(COMPONENT)' \
        'Created-By: Packages' 'Origin: Debian' | sort -u
}

install_packages() {
    local package missing=()
    for package in "$@"; do
        [[ $(dpkg-query --show --showformat '${Status}' "$package" 2>&1) == *' installed' ]] ||
            missing+=("$package")
    done
    ((${#missing[@]})) || return 0
    ((EUID == 0)) || fail "missing packages: ${missing[*]} (root installs them)"
    say "installing ${missing[*]}"
    DEBIAN_FRONTEND=noninteractive apt-get "${apt_options[@]}" \
        install -y -qq --no-install-recommends "${missing[@]}" >/dev/null ||
        fail "cannot install ${missing[*]}: apt-get says why above"
}

fetch() {
    say "fetching etcd and the source of Kubernetes"
    apt-get "${apt_options[@]}" -qq download etcd-server golang-github-modern-go-reflect2-dev
    # Unpacked, not installed: the package would start a server.
    dpkg -x etcd-server_*.deb etcd
    dpkg -x golang-github-modern-go-reflect2-dev_*.deb reflect2
    apt-get "${apt_options[@]}" -qq source --download-only kubernetes
    dpkg-source --no-check -x kubernetes_*.dsc source >/dev/null
}

build_apiserver() {
    local bin=$1 work=$PWD vendored=source/vendor/github.com/modern-go/reflect2
    # The vendored reflect2 1.0.1 breaks when built by Go 1.18 or newer: the server starts, and dies
    # with SIGSEGV in mapiterinit at the first custom object. Debian's package of it is 1.0.2.
    rm -f "$vendored"/*.go "$vendored"/*.s
    cp reflect2/usr/share/gocode/src/github.com/modern-go/reflect2/*.{go,s} "$vendored"
    # The build reads its version from git, which a source package lacks.
    cat >version.env <<'VERSION'
KUBE_GIT_VERSION='v1.20.2'
KUBE_GIT_COMMIT='debian'
KUBE_GIT_TREE_STATE='archive'
KUBE_GIT_MAJOR='1'
KUBE_GIT_MINOR='20'
VERSION
    say "building kube-apiserver: about 6 minutes, this once"
    cd source
    mkdir -p .go/src/k8s.io
    ln -sfn ../../.. .go/src/k8s.io/kubernetes
    env PATH="/usr/lib/go-1.19/bin:$PATH" GOPATH="$PWD/.go" GOCACHE="$work/go-cache" GOPROXY=off \
        CGO_ENABLED=0 KUBE_GIT_VERSION_FILE="$work/version.env" \
        make WHAT=cmd/kube-apiserver GOLDFLAGS='-s -w' >"$work/build.log" 2>&1 ||
        { tail -n 20 "$work/build.log"; fail "the build failed: all of it is in $work/build.log"; }
    # Renamed last, so that an interrupted copy is never taken for the server.
    install -m 755 _output/bin/kube-apiserver "$bin/kube-apiserver.new"
    mv "$bin/kube-apiserver.new" "$bin/kube-apiserver"
    cd "$work"
}

say() { echo "apiserver.sh: $*"; }

fail() {
    printf 'apiserver.sh: %s\n' "$@" >&2
    exit 1
}

main
