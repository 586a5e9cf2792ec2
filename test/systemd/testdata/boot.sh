#!/usr/bin/env bash
# Boots systemd as process 1 of this PID namespace: the one of this host, with a system that consists of the targets of
# booting and nothing else.
#
#   boot.sh DIR NAME     DIR/bin: programs for /usr/bin. DIR/units: for /etc/systemd/system.
#                        DIR/sysusers: for /etc/sysusers.d. DIR/lib: becomes /var/lib.
#
# It runs in mount, PID, IPC and UTS namespaces of its own, and in a control group NAME in each hierarchy, which the
# test removes.
set -euo pipefail
dir=$1 name=$2

if [ "${3:-}" != inside ]; then
  # Join a control group of our own in each hierarchy, and begin a namespace with it as root.
  mapfile -t groups </proc/self/cgroup # before it changes
  for line in "${groups[@]}"; do
    IFS=: read -r _ controllers path <<<"$line"
    case $controllers in
      '') top=/sys/fs/cgroup; [ ! -d $top/unified ] || top=$top/unified ;;
      name=*) top=/sys/fs/cgroup/${controllers#name=} ;;
      *) top=/sys/fs/cgroup/$controllers ;;
    esac
    group=${top}${path%/}/$name
    mkdir "$group"
    for f in cpuset.cpus cpuset.mems; do # groups of version 1 without them take no process
      [ ! -e "$group/$f" ] || [ -s "$group/$f" ] || cat "$group/../$f" >"$group/$f" || true
    done
    echo $$ >"$group/cgroup.procs"
    echo "$group" >>"$dir/groups"
  done
  exec unshare --cgroup "$0" "$dir" "$name" inside
fi

mount --make-rprivate /
mount -t proc proc /proc

# Show control groups as this namespace has them.
if [ "$(stat -f -c %T /sys/fs/cgroup)" = cgroup2fs ]; then
  mount -t cgroup2 cgroup /sys/fs/cgroup
else
  mount -t tmpfs -o mode=755 cgroups /sys/fs/cgroup
  while IFS=: read -r _ controllers _; do
    at=/sys/fs/cgroup/${controllers#name=}
    [ -n "$controllers" ] || at=/sys/fs/cgroup/unified
    mkdir "$at"
    case $controllers in
      '') mount -t cgroup2 cgroup "$at" ;;
      name=*) mount -t cgroup -o "none,$controllers" cgroup "$at" ;;
      *) mount -t cgroup -o "$controllers" cgroup "$at" ;;
    esac
  done </proc/self/cgroup
fi

# Give the host's files a layer of our own where the test writes.
for where in /etc /usr/bin; do
  mkdir -p "$dir/upper$where" "$dir/work$where"
  mount -t overlay -o "lowerdir=$where,upperdir=$dir/upper$where,workdir=$dir/work$where" overlay $where
done
mount --bind "$dir/lib" /var/lib
cp "$dir"/bin/* /usr/bin/
mkdir -p /etc/sysusers.d
cp "$dir"/sysusers/* /etc/sysusers.d/

# A system of targets only.
units=$(dirname "$(readlink -f /lib/systemd/system/basic.target)")
mkdir "$dir/targets"
cp "$units"/{basic,sysinit,sockets,timers,paths,slices,local-fs,local-fs-pre,multi-user,shutdown,umount,final}.target \
  "$dir/targets/"
mount --bind "$dir/targets" "$units"
mount -t tmpfs generators "$units/../system-generators"
mount -t tmpfs units /etc/systemd
mkdir /etc/systemd/system
cp "$dir"/units/* /etc/systemd/system/
mount -t tmpfs -o mode=755 run /run
mount --bind /dev/null /dev/console

mount --make-rshared /
systemd=$units/../systemd
exec env -i container=test PATH="$PATH" "$systemd" --system --unit=basic.target --log-target=null
