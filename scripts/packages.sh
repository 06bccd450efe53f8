# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
# Installs packages of Debian 12 and 13 and Ubuntu 24.04 where they are missing. To be sourced:
#
#   . "$(dirname "$0")/packages.sh"
#   install_missing "${build_packages[@]}"

# What building the library's programs needs. The names are used by the scripts that source this file.
# shellcheck disable=SC2034
build_packages=(g++ meson ninja-build pkg-config python3 nlohmann-json3-dev libfmt-dev librange-v3-dev
                libcurl4-openssl-dev libboost-dev libcli11-dev)
# What the tests need beside.
# shellcheck disable=SC2034
test_packages=(doctest-dev python3-venv ccache doxygen libucx-dev iproute2 util-linux)

have_package() {
    [ "$(dpkg-query -W -f '${db:Status-Status}' "$1" 2>/dev/null)" = installed ]
}

apt_updated=no
apt_update() {
    if [ "$apt_updated" = no ]; then
        echo "updating the list of packages"
        timeout 300 apt-get update -qq -o Acquire::Retries=3 </dev/null >/dev/null || return 1
        apt_updated=yes
    fi
}

# Installs the named packages that are missing. Without dpkg, or without the right to install, it says what is missing
# and returns 1: what needs it will say so itself.
install_missing() {
    if ! command -v dpkg-query >/dev/null; then
        echo "not a Debian system: nothing is installed"
        return 0
    fi
    local missing=() package
    for package in "$@"; do
        have_package "$package" || missing+=("$package")
    done
    [ ${#missing[@]} -eq 0 ] && return 0
    if [ "$(id -u)" -ne 0 ]; then
        echo "missing, and only root can install: ${missing[*]}"
        return 1
    fi
    echo "installing ${missing[*]}"
    apt_update || echo "the list of packages could not be updated; trying with the one that is here"
    if ! DEBIAN_FRONTEND=noninteractive timeout 900 apt-get install -qq -y --no-install-recommends \
        -o Acquire::Retries=3 -o DPkg::Lock::Timeout=120 "${missing[@]}" </dev/null >/dev/null; then
        echo "apt-get could not install: ${missing[*]}"
        return 1
    fi
}

# Prints the number of a clang of 16 or newer: an installed one, newest first; else the oldest that the distribution
# offers, which is what the library promises to compile with. Nothing where there is none.
choose_clang() {
    local number offered
    for number in $(seq 40 -1 16); do
        if command -v "clang++-$number" >/dev/null; then
            echo "$number"
            return
        fi
    done
    [ "$(id -u)" -eq 0 ] && command -v apt-cache >/dev/null || return 0
    apt_update >&2 || true
    for number in $(seq 16 40); do
        offered=$(apt-cache policy "clang-$number" 2>/dev/null | sed -n 's/^ *Candidate: //p')
        if [ -n "$offered" ] && [ "$offered" != "(none)" ]; then
            echo "$number"
            return
        fi
    done
}
