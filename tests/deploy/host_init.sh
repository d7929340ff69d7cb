#!/usr/bin/env bash
# Process 1 of a machine made of namespaces: own processes, mounts, name and network, an ssh server, and nothing else.
# Arguments: name, address with prefix length, gateway, state folder (home/, sshd_config, keys), home folder of root,
# folder shared by all machines and where it is mounted, folders of this machine that stay visible.
set -eu
name=$1 address=$2 gateway=$3 state=$4 home=$5 shared=$6 at=$7
shift 7

hostname "$name"
mount --make-rprivate /
mount -t tmpfs tmpfs /mnt
mkdir /mnt/state /mnt/shared
mount --bind "$state" /mnt/state
mount --bind "$shared" /mnt/shared
number=0
for kept; do
    mkdir "/mnt/$number"
    mount --bind "$kept" "/mnt/$number"
    number=$((number + 1))
done
mount -t tmpfs -o mode=1777 tmpfs /tmp
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
mount -t tmpfs tmpfs /run
mount --bind /mnt/state/home "$home"
mkdir -p /run/sshd "$at"
mount --bind /mnt/shared "$at"
number=0
for kept; do
    mkdir -p "$kept"
    mount --bind "/mnt/$number" "$kept"
    mount -o remount,ro,bind "$kept"
    number=$((number + 1))
done
mount -t proc proc /proc

# The link comes from outside, once this process is there to give it to.
for _ in $(seq 100); do
    ip link show eth0 > /dev/null 2>&1 && break  # /sys tells of the devices outside
    sleep 0.1
done
ip link set lo up
ip address add "$address" dev eth0
ip link set eth0 up
ip route add default via "$gateway"
exec /usr/sbin/sshd -D -e -f /mnt/state/sshd_config
