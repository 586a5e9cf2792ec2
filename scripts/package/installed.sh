#!/bin/sh
# Runs when the package has been installed or updated. It starts nothing that was not running.
set -e

if ! getent group pando >/dev/null; then
  if command -v systemd-sysusers >/dev/null; then
    systemd-sysusers pando.conf
  else
    groupadd --system pando
  fi
fi

# Sockets stay open while the service restarts: clients notice that their request takes a moment longer.
if [ -d /run/systemd/system ]; then
  systemctl daemon-reload
  systemctl try-restart pando.service
fi
