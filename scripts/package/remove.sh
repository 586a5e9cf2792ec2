#!/bin/sh
# Runs before the package is removed or updated: "remove" or 0 is a removal. Mounts and the group stay.
set -e

case $1 in
  remove | 0)
    if [ -d /run/systemd/system ]; then
      systemctl disable --now pando.socket pando.service
    else
      rm -f /etc/systemd/system/*.wants/pando.socket /etc/systemd/system/*.wants/pando.service
    fi
    ;;
esac
