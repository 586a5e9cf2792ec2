package errs_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"strings"
	"testing"

	"pando/internal/base/errs"
)

// shout is a front end.
type shout struct{}

func (shout) Operation(o errs.Operation) string {
	out := strings.ToUpper(o.Name)
	for _, a := range o.Args {
		switch a := a.(type) {
		case errs.Text:
			out += "(" + string(a) + ")"
		case errs.Parameter:
			out += "[" + a.Name + "]"
		}
	}
	return out
}

func (shout) Parameter(p errs.Parameter) string { return "<" + p.Name + "=" + p.Value + ">" }
func (shout) Variable(v errs.Variable) string   { return "$" + string(v) }

// Each front end words the same hint in its own way.
func TestRender(t *testing.T) {
	for _, c := range []struct {
		hint             errs.Message
		neutral, shouted string
	}{
		{errs.Message(""), "", ""},
		{errs.Messagef(""), "", ""},
		{errs.Messagef("wait"), "wait", "wait"},
		{errs.Messagef("100%% of %d, %q", 3, "x"), `100% of 3, "x"`, `100% of 3, "x"`},
		{errs.Messagef("%s first", errs.Run("umount", "web")), `operation "umount" of web first`, "UMOUNT(web) first"},
		{errs.Messagef("leave %s out", errs.Param("size")), `leave parameter "size" out`, "leave <size=> out"},
		{errs.Messagef("%s", errs.Param("fs", "none")), `parameter "fs" set to none`, "<fs=none>"},
		{errs.Messagef("%s or %s", errs.Param("pool", "DIR"), errs.Variable("PANDO_POOL")),
			`parameter "pool" set to DIR or environment variable PANDO_POOL`, "<pool=DIR> or $PANDO_POOL"},
		{errs.Messagef("%s", errs.Run("golden import", errs.Param("update"), errs.Param("fs", "xfs"), "web", 7)),
			`operation "golden import" of web, 7 with parameter "update" and parameter "fs" set to xfs`,
			"GOLDEN IMPORT[update][fs](web)(7)"},
		{errs.Messagef("%s; or %s: %v", errs.Messagef("try %s", errs.Run("gc")), "wait", errors.New("busy")),
			`try operation "gc"; or wait: busy`, "try GC; or wait: busy"},
		// A name is never taken for a part, whatever it holds.
		{errs.Messagef("%s and %s", errs.Run("gc"), "\x00oumount\x00"), `operation "gc" and \x00oumount\x00`,
			`GC and \x00oumount\x00`},
		{errs.Messagef("%s", errs.Run("gc", "a\x01b", errs.Param("c\x02", "d\x00"))),
			`operation "gc" of a\x01b with parameter "c\\x02" set to d\x00`, `GC(a\x01b)[c\x02]`},
	} {
		if got := c.hint.String(); got != c.neutral {
			t.Errorf("neutral: %q, want %q", got, c.neutral)
		}
		if got := c.hint.Render(shout{}); got != c.shouted {
			t.Errorf("shouted: %q, want %q", got, c.shouted)
		}
		if got := fmt.Sprintf("<%s>", c.hint); got != "<"+c.neutral+">" {
			t.Errorf("printed: %q, want %q", got, c.neutral)
		}
		if b, err := json.Marshal(c.hint); err != nil || string(b) != jsonString(t, c.neutral) {
			t.Errorf("marshalled: %s, %v", b, err)
		}
	}
}

func jsonString(t *testing.T, s string) string {
	t.Helper()
	b, err := json.Marshal(s)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

func TestParts(t *testing.T) {
	umount := errs.Run("umount", "web")
	h := errs.Messagef("%s first, %s", umount, errs.Messagef("or %s", errs.Param("force")))
	want := []errs.Part{umount, errs.Text(" first, or "), errs.Param("force")}
	if got := h.Parts(); !reflect.DeepEqual(got, want) {
		t.Errorf("%#v, want %#v", got, want)
	}
	joined := "first: " + h + "; " + errs.Messagef("%s", errs.Run("gc"))
	if got, want := joined.Render(shout{}), "first: UMOUNT(web) first, or <force=>; GC"; got != want {
		t.Errorf("joined: %q, want %q", got, want)
	}
	err := errs.New(errs.InUse, "destroy", "web", "%w", errs.New(errs.InUse, "", "", "busy").WithHint("%s first", umount))
	if got := errs.HintIn(err).Parts(); len(got) != 2 || !reflect.DeepEqual(got[0], errs.Part(umount)) {
		t.Errorf("%#v", got)
	}
}
