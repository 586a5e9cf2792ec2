package examples

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
)

// dockerVolumes does what docs/migrate.md says about Docker volumes, with an engine: $1 is a directory to work in, $2 a
// control group, $3 the root directory of an image.
const dockerVolumes = `
set -e
mkdir "$1"
mkdir -p /run/containerd
mount -t tmpfs none /run/containerd
dockerd --data-root "$1/root" --exec-root /run/containerd/docker --pidfile "$1/pid" --host "unix://$1/s" \
  --cgroup-parent "$2" --bridge=none --iptables=false >"$1/log" 2>&1 &
export DOCKER_HOST=unix://$1/s
until docker version >/dev/null 2>&1; do kill -0 $! || exit 1; sleep 0.05; done
tar -C "$3" -c . | docker import - shell >/dev/null
docker volume create db
echo rows >"$1/table"
docker create --name filler -v db:/data shell /bin/sleep 0 >/dev/null
docker cp "$1/table" filler:/data/table
docker rm filler >/dev/null

"$PANDO" golden import db "$(docker volume inspect db --format '{{.Mountpoint}}')" -q
"$PANDO" clone db db-test-1 --mount "$1/clone" -q >/dev/null
echo more >"$1/second"
docker run --detach --network none --name test -v "$1/clone:/data" shell /bin/sleep 1000 >/dev/null
docker cp "$1/second" test:/data/second
cat "$1/clone/table" "$1/clone/second"
test ! -e "$1/root/volumes/db/_data/second"
docker rm --force test >/dev/null
docker volume rm db
"$PANDO" destroy db-test-1
kill $!
wait $! || true
`

// TestMigrateDockerVolumes moves a volume of a real engine to a pool, and gives a container a clone of it.
func TestMigrateDockerVolumes(t *testing.T) {
	needDocker(t)
	dir := workDir(t)
	group := "pando-migrate-" + strconv.Itoa(os.Getpid())
	t.Cleanup(func() { removeGroups(group) })
	env := []string{"PANDO_POOL=" + filepath.Join(dir, "pool")}
	if out, err := command(t, env, pando, "init", "--size", "1G").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}

	out, err := command(t, env, "unshare", "--mount", "--propagation", "slave", "--pid", "--fork", "--kill-child",
		"--mount-proc", "bash", "-c", dockerVolumes, "bash", filepath.Join(dir, "e"), group, shellRoot(t)).CombinedOutput()
	if want := "db\ndb@1\nrows\nmore\ndb\ndestroyed db-test-1\n"; err != nil || string(out) != want {
		log, _ := os.ReadFile(filepath.Join(dir, "e/log"))
		lines := strings.Split(string(log), "\n")
		t.Errorf("%v, %q, wanted %q: %s", err, out, want, strings.Join(lines[max(0, len(lines)-5):], "\n"))
	}
	waitForEnd(t, filepath.Join(dir, "e"))
	if out, err := command(t, env, pando, "deinit", "--force").CombinedOutput(); err != nil {
		t.Errorf("%v: %s", err, out)
	}
}
