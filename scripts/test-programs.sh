# For sourcing: what the tests of more than one package need, built once, in $top, which is gone when the script ends.
# The script names the tools that it needs besides.
#
#   . scripts/test-programs.sh ./tools/isolate ...
# shellcheck shell=bash
: "${me:?}" # the script, for messages
top=$(mktemp -d "${TMPDIR:-/tmp}/pando-make-test.XXXXXX")
trap 'rm -rf "$top"' EXIT
trap 'exit 130' HUP INT TERM
go() { scripts/go.sh go "$@"; }

mkdir -p out
go build -o "$top/" "$@"
go build -ldflags '-s -w' -o "$top/pando" ./cmd/pando
for server in gofakes3 versitygw fakegcs; do
  GOFLAGS='-mod=readonly -trimpath -buildvcs=false' go -C test/servers tool -n "$server" >/dev/null ||
    echo "$me: could not build $server; tests that need it will say so" >&2
done

# What the tests ask of Go's modules is fetched here: as root, they have no network.
go list -m all >/dev/null || echo "$me: could not list all modules; the test of tools/sbom may say so" >&2

export PANDO_TEST_BINARY=$top/pando
export GOGC=${GOGC:-400} # there is more memory than processors; tests about memory set what users have

# run_tool COMMAND...: until it ends. A signal becomes SIGTERM for it, as it need not be in the group of a terminal.
run_tool() {
  local tool status
  nice -n 10 scripts/go.sh "$@" &
  tool=$!
  # shellcheck disable=SC2064 # this tool
  trap "kill -TERM $tool 2>/dev/null || true" HUP INT QUIT TERM
  while status=0; do
    wait "$tool" || status=$?
    kill -0 "$tool" 2>/dev/null || return "$status" # else it was a signal that ended the wait
  done
}
