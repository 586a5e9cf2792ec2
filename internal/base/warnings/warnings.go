// Package warnings collects what went wrong in a call without failing it. The context of the call carries the list, so
// that whoever has something to say, at any depth, needs no other way up, and calls at the same time share nothing.
package warnings

import (
	"context"
	"slices"
	"sync"

	"pando/internal/base/errs"
)

// List collects the warnings of one or more calls. Its zero value is empty. It may be used concurrently.
type List struct {
	mu    sync.Mutex
	lines []line
	seen  map[errs.Message]bool // texts, also of those that are only counted
}

// line is one warning, or several of a kind.
type line struct {
	kind string       // "": it stands alone
	text errs.Message // of the first of its kind
	more int          // of its kind, with other texts
}

type key struct{}

// Collect returns a context whose calls add their warnings to l, and to no other list. Warnings of a context without
// a list are dropped.
func Collect(ctx context.Context, l *List) context.Context {
	return context.WithValue(ctx, key{}, l)
}

// Add reports what went wrong and does not fail the call. Of warnings with the same format only the first is told in
// full: on a full disk, everything goes wrong in the same way.
func Add(ctx context.Context, format string, args ...any) {
	addToContext(ctx, format, errs.Messagef(format, args...))
}

// AddEach is Add where each warning counts, such as those of data that was lost.
func AddEach(ctx context.Context, format string, args ...any) {
	addToContext(ctx, "", errs.Messagef(format, args...))
}

func addToContext(ctx context.Context, kind string, text errs.Message) {
	if l, ok := ctx.Value(key{}).(*List); ok {
		l.addMessage(kind, text)
	}
}

func (l *List) addMessage(kind string, text errs.Message) {
	l.mu.Lock()
	defer l.mu.Unlock()

	// Whoever waits for something tries again and again.
	if l.seen[text] {
		return
	}
	if l.seen == nil {
		l.seen = map[errs.Message]bool{}
	}

	l.seen[text] = true

	at := slices.IndexFunc(l.lines, func(x line) bool { return kind != "" && x.kind == kind })
	if at < 0 {
		l.lines = append(l.lines, line{kind: kind, text: text})
		return
	}

	l.lines[at].more++
}

// Messages returns the warnings, the oldest first, each text once. Where many things went wrong in the same way, one
// line says so: the first, and how many more there are.
func (l *List) Messages() []errs.Message {
	l.mu.Lock()
	defer l.mu.Unlock()

	var out []errs.Message
	for _, x := range l.lines {
		if x.more > 0 {
			x.text = errs.Messagef("%s (and %d more like this)", x.text, x.more)
		}
		out = append(out, x.text)
	}
	return out
}
