package warnings_test

import (
	"bytes"
	"log/slog"
	"strings"
	"testing"

	"pando/internal/base/logs"
	"pando/internal/base/warnings"
)

// TestAreCounted: many things that go wrong in the same way are one line.
func TestAreCounted(t *testing.T) {
	var said warnings.List
	ctx := warnings.Collect(t.Context(), &said)
	for i := range 150 {
		for range 2 {
			warnings.Add(ctx, "object %d could not be removed", i)
		}
	}
	warnings.Add(ctx, "another thing")
	for _, name := range []string{"a", "b"} {
		warnings.AddEach(ctx, "%s lost writes", name)
	}

	var lines []string
	for _, m := range said.Messages() {
		lines = append(lines, m.String())
	}
	want := "object 0 could not be removed (and 149 more like this)\nanother thing\na lost writes\nb lost writes"
	if got := strings.Join(lines, "\n"); got != want {
		t.Errorf("%s\nwanted\n%s", got, want)
	}
}

// TestBelongToTheInnermostList: a call within another may collect for itself, and without a list nothing happens.
func TestBelongToTheInnermostList(t *testing.T) {
	warnings.Add(t.Context(), "dropped")

	var outer, inner warnings.List
	ctx := warnings.Collect(t.Context(), &outer)
	warnings.Add(warnings.Collect(ctx, &inner), "of the inner call")
	if len(outer.Messages()) != 0 || len(inner.Messages()) != 1 {
		t.Errorf("outer %q, inner %q", outer.Messages(), inner.Messages())
	}
}

// TestAreLogged: what is collected, or not, is in the log, without secrets.
func TestAreLogged(t *testing.T) {
	var out bytes.Buffer
	ctx := logs.With(t.Context(), slog.New(slog.NewTextHandler(&out, nil)))
	warnings.Add(ctx, "cannot reach %s", "https://user:secret@host/")
	said := warnings.Collect(ctx, &warnings.List{})
	for range 3 { // callers that try something again and again say the same each time
		warnings.AddEach(said, "one that is collected")
	}
	got := out.String()
	if strings.Count(got, "level=WARN") != 2 || !strings.Contains(got, "https://***@host/") ||
		!strings.Contains(got, "collected") || strings.Contains(got, "secret") {
		t.Error(got)
	}
}
