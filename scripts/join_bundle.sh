#!/usr/bin/env bash
# Join the parts that scripts/bundle.sh --parts has cut, once all are as they were made.
#   scripts/join_bundle.sh PARTS DIR    makes the folder DIR, for scripts/setup.sh --bundle DIR
#   scripts/join_bundle.sh /media/disk/bundle.parts bundle
set -euo pipefail
[ "${1:-}" != --help ] || {
    sed -n '2,/^set/s/^# \{0,1\}//p' "$0"
    exit 0
}

die() {
    echo "join_bundle.sh: error: $*" >&2
    exit 2
}

[ $# = 2 ] || die "the arguments are '$*'; give the folder of the parts and the folder to make."
parts=$1 folder=$2
[ -f "$parts/SHA256SUMS" ] || die "$parts has no SHA256SUMS; give the folder DIR.parts that scripts/bundle.sh made."
[ ! -e "$folder" ] || die "$folder is there already; name another folder."
if ! checked=$(cd "$parts" && LC_ALL=C sha256sum --check SHA256SUMS 2>/dev/null); then
    die "of the parts in $parts, these are damaged or missing:" \
        "$(sed -n 's/: FAILED.*//p' <<<"$checked" | paste -sd ' '); copy them again."
fi
rm -rf "$folder.partial"
mkdir -p "$folder.partial"
cat "$parts"/part-* | tar -C "$folder.partial" -xf -
mv "$folder.partial" "$folder"
echo "join: $folder is whole; scripts/setup.sh --bundle $folder installs from it"
