package cli

import (
	"bytes"
	"context"
	"encoding/json"
	"testing"

	"pando/internal/base/errs"
	"pando/internal/engine/check"
)

func TestWords(t *testing.T) {
	for _, c := range []struct {
		message errs.Message
		want    string
	}{
		{"", ""},
		{errs.Messagef("%s first", errs.Run("umount", "web")), "`pando umount web` first"},
		{errs.Messagef("%s", errs.Run("golden import", errs.Param("update"), errs.Param("fs", "xfs"), "web", "...")),
			"`pando golden import --update --fs xfs web ...`"},
		{errs.Messagef("leave %s out", errs.Param("size")), "leave --size out"},
		{errs.Messagef("%s or %s", errs.Param("pool", "DIR"), errs.Variable("PANDO_POOL")), "--pool DIR or PANDO_POOL"},
	} {
		if got := renderMessage(c.message); got != c.want {
			t.Errorf("%q, want %q", got, c.want)
		}
	}
}

// Messages in results are rendered wherever they stand, in JSON and in text.
func TestResultsAreRendered(t *testing.T) {
	m := errs.Messagef("%s <b>", errs.Run("gc"))
	const want = "`pando gc` <b>"
	type deep struct {
		Plain string
		M     errs.Message
		Any   any
		Map   map[string]errs.Message
		P     *check.Finding
		Left  errs.Message `json:",omitempty"`
		own   errs.Message
	}
	in := []deep{{Plain: "x", M: m, Any: map[string]any{"m": m, "nil": nil}, Map: map[string]errs.Message{"k": m},
		P: &check.Finding{Repair: m}, own: m}}
	var out, stderr bytes.Buffer
	a := &App{Stdout: &out, Stderr: &stderr}
	if err := a.printJSON(map[string]any{"all": in}); err != nil {
		t.Fatal(err)
	}
	var got struct {
		All []struct {
			M, Left string
			Any     map[string]any
			Map     map[string]string
			P       struct{ Repair string }
		}
	}
	if err := json.Unmarshal(out.Bytes(), &got); err != nil || len(got.All) != 1 {
		t.Fatalf("%v: %s", err, out.Bytes())
	}
	if d := got.All[0]; d.M != want || d.Any["m"] != want || d.Map["k"] != want || d.P.Repair != want ||
		bytes.Contains(out.Bytes(), []byte("Left")) {
		t.Errorf("%s", out.Bytes())
	}

	out.Reset()
	if err := a.printf("%s", m); err != nil || out.String() != want {
		t.Errorf("printf: %q, %v", out.String(), err)
	}
	a.printWarning("%s", m)
	a.printNote("%s", m)
	if got, want := stderr.String(), "pando: warning: "+want+"\npando: "+want+"\n"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
	stderr.Reset()
	a.json = true
	a.printError(errs.New(errs.InUse, "destroy", "web", "mounted").WithHint("%s first", errs.Run("umount", "web")))
	if want := `"hint":"` + "`pando umount web` first"; !bytes.Contains(stderr.Bytes(), []byte(want)) {
		t.Errorf("%s", stderr.Bytes())
	}
}

// A command that fails tells what to type.
func TestHintOfACommand(t *testing.T) {
	var stderr bytes.Buffer
	a := &App{Stdout: &bytes.Buffer{}, Stderr: &stderr, dir: t.TempDir()}
	if code := a.Run(context.Background(), []string{"--pool", t.TempDir() + "/none", "ls"}); code == 0 {
		t.Fatal("a pool that is not there was listed")
	}
	want := "hint: create one with `pando init`, or choose another with --pool DIR or PANDO_POOL\n"
	if !bytes.Contains(stderr.Bytes(), []byte(want)) {
		t.Errorf("%s", stderr.Bytes())
	}
}
