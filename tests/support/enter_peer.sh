# Runs a command in a root file system: enter_peer.sh ROOT COMMAND...
# To be started in a mount namespace of its own. Of the variants of ggml's processor backend only GGML_CPU_VARIANT is left,
# if that is set. The whole host appears under /host, so that any file of a test has a
# name inside.
set -e
root=$1
shift
mkdir -p "$root/host"
mount --rbind /proc "$root/proc"
mount --rbind /dev "$root/dev"
mount --rbind / "$root/host"
if [ -n "$GGML_CPU_VARIANT" ]; then
    for library in "$root"/usr/lib/*/ggml/backends*/libggml-cpu-*.so; do
        case $library in
        *-"$GGML_CPU_VARIANT".so) ;;
        *) mount --bind /dev/null "$library" ;;
        esac
    done
fi
exec chroot "$root" "$@"
