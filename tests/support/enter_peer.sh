# Runs a command in a root file system: enter_peer.sh ROOT COMMAND...
# To be started in a mount namespace of its own. The whole host appears under /host, so that any file of a test has a
# name inside.
set -e
root=$1
shift
mkdir -p "$root/host"
mount --rbind /proc "$root/proc"
mount --rbind /dev "$root/dev"
mount --rbind / "$root/host"
exec chroot "$root" "$@"
