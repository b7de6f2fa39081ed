# The environment of scripts/tune and scripts/test: made once, found ready by every later call.
# To be sourced. Plain enough for the bash 3.2 of macOS, and needs no command beyond POSIX and Python.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
venv=${TUNER_VENV:-$root/.venv}
case $venv in
    /*) ;;
    *) venv=$PWD/$venv ;;
esac

say() {
    printf '%s: %s\n' "$(basename "$0")" "$*" >&2
}

# Prints the first Python that can hold the project. A name on PATH may be a shim that runs nothing, so each is run.
find_python() {
    local name found=none
    for name in python3.11 python3.12 python3.13 python3 python; do
        if "$name" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' \
            >/dev/null 2>&1; then
            command -v "$name"
            return
        fi
        if [ "$found" = none ] && "$name" -c '' >/dev/null 2>&1; then
            found="$("$name" -V 2>&1) ($(command -v "$name"))"
        fi
    done
    say "wanted Python 3.11, 3.12 or 3.13 with its venv module on PATH, found $found;" \
        "install one (Debian, Ubuntu: apt-get install python3 python3-venv) and call again"
    return 1
}

# What the environment must have been made from. The path is part of it: a moved project needs its environment anew.
recipe() {
    printf '%s\n' "$root"
    cat "$root/pyproject.toml" "$root/scripts/constraints.txt"
}

# is_ready KIND...: whether the environment was finished for one of these kinds, from what is here now.
is_ready() {
    local kind
    [ -x "$venv/bin/python" ] || return 1
    for kind in "$@"; do
        if [ -f "$venv/tuner-$kind" ] && recipe | cmp -s - "$venv/tuner-$kind"; then
            return 0
        fi
    done
    return 1
}

# Waits for the lock on file descriptor 9. Python's flock, since macOS has no flock command; the lock belongs to the
# open file, so it stays when that Python ends.
lock() {
    local flock='import fcntl, sys; fcntl.flock(9, fcntl.LOCK_EX | int(sys.argv[1]))'
    if ! "$1" -c "$flock" 4 2>/dev/null; then
        say "waiting for another call that makes $venv"
        "$1" -c "$flock" 0
    fi
}

# An environment that a call did not finish is thrown away; one that tuner did not begin is not touched.
start_anew() {
    local python=$1
    if [ -n "$(ls -A "$venv" 2>/dev/null)" ] && [ ! -f "$venv/made-by-tuner" ]; then
        say "wanted to make an environment at $venv, found something else there; remove it, or set TUNER_VENV" \
            "to another path"
        return 1
    fi
    mkdir -p "$venv"
    : >"$venv/made-by-tuner"
    # The mark stays while the rest goes, or a call killed here would leave what the next one refuses.
    find "$venv" -mindepth 1 -maxdepth 1 ! -name made-by-tuner -exec rm -rf {} +
    "$python" -m venv "$venv"
}

# make_environment EXTRAS KIND...: unless it is ready for one of these kinds, installs the project and its dependencies
# at the versions of constraints.txt, and marks it as the first kind. Another call may do the same at the same time.
# pip's output goes to stderr: stdout belongs to what runs afterwards.
make_environment() {
    local extras=$1 python quiet=--quiet
    shift
    if is_ready "$@"; then
        return
    fi
    python=$(find_python)
    if [ -t 2 ]; then
        quiet=--progress-bar=on
    fi
    mkdir -p "$(dirname "$venv")"
    (
        lock "$python"
        if is_ready "$@"; then
            exit 0
        fi
        say "making the environment $venv with $("$python" -V) (once; PyTorch is large)"
        if [ ! -x "$venv/bin/python" ] || ! ls "$venv"/tuner-* >/dev/null 2>&1; then
            start_anew "$python"
        fi
        # No stamp while packages change: a call that is killed here leaves an environment that is made anew.
        rm -f "$venv"/tuner-*
        cd "$root"
        "$venv/bin/python" -m pip install "$quiet" --disable-pip-version-check --no-compile \
            --constraint scripts/constraints.txt --editable ".$extras"
        # pip would compile all of torch on one core, which takes longer than the rest. Not left to the first import:
        # with PYTHONDONTWRITEBYTECODE that would happen in every process. What does not compile is not imported.
        "$venv/bin/python" -m compileall -q -j 0 "$venv/lib" >/dev/null 2>&1 || true
        recipe >"$venv/unfinished"
        mv "$venv/unfinished" "$venv/tuner-$1"
    ) 9>"$venv.lock" 1>&2
}
