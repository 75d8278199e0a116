# Shared by the scripts beside it; not run on its own.
# shellcheck shell=sh

umask 077

# Whatever Flower reports home about is off, and so is its look for newer releases.
export FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1

# die MESSAGE: what was found, what was expected, what to do.
die() {
    printf '%s: %s\n' "${0##*/}" "$*" >&2
    exit 1
}

# misused MESSAGE: an error in how the script was called.
misused() {
    printf '%s: %s\n\n' "${0##*/}" "$*" >&2
    usage >&2
    exit 2
}

# need COMMAND WHERE_FROM
need() {
    command -v "$1" > /dev/null || die "no $1 on PATH; expected it from $2. Install that, or put its folder on PATH."
}

# has_value OPTION NUMBER_OF_ARGUMENTS_LEFT
has_value() {
    [ "$2" -ge 2 ] || misused "$1 has no value; expected one after it."
}

# is_file WHAT PATH HINT
is_file() {
    [ -f "$2" ] || die "no $1 at $2; expected a file. $3"
}

# is_private WHAT PATH
is_private() {
    is_file "$1" "$2" "Make it first; README.md says how."
    case $(ls -ld -- "$2") in
        ????------*) ;;
        *) die "others may read the $1 $2; expected mode 0600. Run: chmod 600 $2" ;;
    esac
}

# is_whole NAME VALUE: a whole number above 0
is_whole() {
    case $2 in
        '' | *[!0-9]* | 0*) misused "$1 is '$2'; expected a whole number above 0." ;;
    esac
}

# is_name WHAT VALUE: safe as part of a file's name and in a configuration
is_name() {
    case $2 in
        '' | .* | -* | *[!A-Za-z0-9._-]*)
            misused "$1 is '$2'; expected letters, digits, dots, dashes and underscores, a letter or digit first." ;;
    esac
}

# absolute PATH: of a folder that is there
absolute() {
    (cd -- "$1" && pwd)
}
