package model

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"testing"

	"pando/internal/base/ref"
	"pando/internal/driver/zfs"
	"pando/internal/engine"
	"pando/internal/testing/testfs"
)

var pando string // the binary

func TestMain(m *testing.M) {
	engine.Helper(os.Args)
	if err := testfs.ShareMounts(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(testfs.WithProgram(&pando, m.Run))
}

// inUse is the exit code of what is refused because something is in use.
const inUse = 5

// otherBoot runs the program in another mount namespace with another boot ID, as in a container
// that shares the pool. Nothing that it does there may change what the model knows, and what is
// mounted here is refused there.
func (m *model) otherBoot(v string, vol *volume) {
	if os.Geteuid() != 0 || m.e.Caps().Name == zfs.Name {
		m.nonsense(v, vol) // without root nothing is mounted; a guest is too slow
		return
	}
	args, want := []string{"gc"}, 0
	if vol.mounted && !vol.pinned {
		args, want = []string{[]string{"destroy", "umount"}[m.r.IntN(2)], v}, inUse
	}
	m.note("other boot", "%v", args)
	out, err := testfs.OtherBoot(m.t, pando, append([]string{"--pool", m.dir}, args...)...).CombinedOutput()
	got := 0
	if exit := (*exec.ExitError)(nil); errors.As(err, &exit) {
		got = exit.ExitCode()
	} else if err != nil {
		m.t.Fatal(err)
	}
	if got != want {
		m.t.Errorf("pando %v under another boot ID: exit code %d, wanted %d: %s", args, got, want, out)
	}
	for _, g := range m.goldens { // gc does what a pin had put off
		if want == 0 {
			m.retain(g)
		}
	}
	d, err := m.e.Show(m.t.Context(), ref.Ref{Name: v})
	m.must(err)
	if d.Mounted() != vol.mounted {
		m.t.Errorf("after pando %v under another boot ID: %+v", args, d.Object)
	} else if vol.mounted {
		m.same(v, d.Mountpoint, vol.content)
	}
}

// toDestroy is a request to destroy what words name.
func toDestroy(words ...string) engine.DestroyRequest {
	what, err := ref.ParsePatterns("destroy", words...)
	if err != nil {
		panic(err)
	}
	return engine.DestroyRequest{What: what}
}
