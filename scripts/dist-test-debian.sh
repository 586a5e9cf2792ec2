#!/usr/bin/env bash
# The part of scripts/dist-test.sh that runs inside of a clean Debian, with the package in /root/pando.deb:
#
#   dist-test-debian.sh apt|install|use|remove
set -euo pipefail

die() {
  printf '%s\n' "$*"
  exit 1
}
same() { [ "$1" = "$2" ] || die "$3: got $1, want $2"; }

# What packages put into a system; without the records of those who put it there.
files() {
  find / -xdev \( -path /proc -o -path /sys -o -path /dev -o -path /run -o -path /root -o -path /tmp -o -path /var/lib/dpkg \
    -o -path /var/lib/apt -o -path /var/cache -o -path /var/log \) -prune -o -print | sort
}

case $1 in
  apt)
    [ ! -e /usr/bin/pando ] || die 'this Debian is not clean'
    apt-get -q -y --no-install-recommends install /root/pando.deb
    mkfs.xfs -V
    mkfs.ext4 -V
    pando version
    apt-get -q -y remove pando
    files >/root/before
    ;;

  install)
    dpkg -i /root/pando.deb
    dpkg --verify pando
    version=$(dpkg-query -W -f '${Version}' pando)

    # Every command that help lists, at all levels.
    pages() {
      local command name
      name=$(tr ' ' - <<<"pando${1:+ $1}")
      zcat "/usr/share/man/man1/$name.1.gz" | grep -q "^\.TH .*\"pando $version\"" || die "no manual page of pando $1"
      # shellcheck disable=SC2086
      pando $1 --help | awk '/^Usage:/ { usage = 1 } /^Additional help/ { exit }
        usage && /^[A-Z].*:$/ { on = !/^(Flags|Global Flags|Usage|Examples|Aliases):/ }
        on && /^  [a-z]/ { print $1 }' | while read -r command; do
        [ "$command" = help ] || pages "${1:+$1 }$command"
      done
    }
    pages ''
    zcat /usr/share/man/man7/pando-exit-codes.7.gz | grep -q '^\.TH'

    # shellcheck disable=SC1091
    bash -ec '. /usr/share/bash-completion/completions/pando; complete -p pando'
    grep -q '^#compdef pando' /usr/share/zsh/vendor-completions/_pando
    grep -q 'complete -c pando' /usr/share/fish/vendor_completions.d/pando.fish
    getent group pando || die 'there is no group pando'
    [ -e /usr/lib/systemd/system/pando.socket ] || die 'there are no units'
    pando __complete golden '' 2>/dev/null | grep -q ^import || die 'completion does not know golden import'
    ;;

  use)
    mkdir -p /srv/web/pages
    echo hello >/srv/web/pages/index
    pando init
    same "$(pando golden import -q web /srv/web)" web@1 import
    dir=$(pando clone web job -q --mount)
    same "$(cat "$dir/pages/index")" hello 'the clone'
    echo changed >"$dir/pages/index"
    pando clone web other --count 3
    same "$(pando run web -q -- cat pages/index)" hello 'another clone'
    same "$(pando ls -q | xargs)" 'job other-1 other-2 other-3' 'pando ls'
    pando fsck
    pando destroy job 'other-*'
    pando golden rm web
    pando deinit
    rm -r /srv/web
    [ ! -e /var/lib/pando ] || die 'deinit left /var/lib/pando'

    # Without systemd, the socket gets the group that the package has made.
    pando init
    mkdir -p /run/pando
    pando serve &
    until [ -S /run/pando/pando.sock ]; do sleep 0.1; done
    same "$(stat -c '%G %a' /run/pando/pando.sock)" 'pando 660' 'the socket'
    kill $!
    wait $!
    pando deinit
    if grep pando /proc/self/mountinfo; then die 'this is still mounted'; fi
    ;;

  remove)
    dpkg -r pando
    if dpkg -s pando; then die 'dpkg knows it still'; fi
    files >/root/after
    diff /root/before /root/after || die 'this is different from before'
    if grep -i pando /root/after; then die 'this is left'; fi
    ;;
esac
