// Package warnings collects problems that do not fail a call. The context of the call carries the list, so that code at
// any depth can add to it, and concurrent calls share nothing.
package warnings

import (
	"context"
	"log/slog"
	"slices"
	"sync"

	"pando/internal/base/errs"
	"pando/internal/base/logs"
)

// List collects the warnings of one or more calls. The zero value is empty. It may be used concurrently.
type List struct {
	mu    sync.Mutex
	lines []line
	seen  map[errs.Message]bool // all texts, including those that are only counted
}

// line is one warning, or several of the same kind.
type line struct {
	kind string       // "": never combined with others
	text errs.Message // the first of its kind
	more int          // number of others of its kind
}

type key struct{}

// Collect returns a context whose warnings go to l only, and are logged. Those of a context without a list are only
// logged.
func Collect(ctx context.Context, l *List) context.Context {
	return context.WithValue(ctx, key{}, l)
}

type listener struct{}

// Listen returns a context in which tell is called with what is worth knowing before work goes on. It may be called
// concurrently.
func Listen(ctx context.Context, tell func(text string)) context.Context {
	return context.WithValue(ctx, listener{}, tell)
}

// Tell passes on what is worth knowing before work goes on. It reports whether somebody listens.
func Tell(ctx context.Context, text string) bool {
	tell, ok := ctx.Value(listener{}).(func(text string))
	if ok {
		tell(text)
	}
	return ok
}

// Add adds a warning. Of several warnings with the same format, only the first is shown in full: on a full disk,
// everything fails in the same way.
func Add(ctx context.Context, format string, args ...any) {
	addToContext(ctx, format, errs.Messagef(format, args...))
}

// AddEach adds a warning that is always shown in full, such as one about lost data.
func AddEach(ctx context.Context, format string, args ...any) {
	addToContext(ctx, "", errs.Messagef(format, args...))
}

func addToContext(ctx context.Context, kind string, text errs.Message) {
	if l, ok := ctx.Value(key{}).(*List); ok && !l.addMessage(kind, text) {
		return
	}
	if log := logs.From(ctx); log.Enabled(ctx, slog.LevelWarn) {
		log.WarnContext(ctx, text.String())
	}
}

// addMessage adds a warning, and reports whether it has a new text.
func (l *List) addMessage(kind string, text errs.Message) bool {
	l.mu.Lock()
	defer l.mu.Unlock()

	// Drop repeated texts: callers that wait for something retry many times.
	if l.seen[text] {
		return false
	}
	if l.seen == nil {
		l.seen = map[errs.Message]bool{}
	}

	l.seen[text] = true

	at := slices.IndexFunc(l.lines, func(x line) bool { return kind != "" && x.kind == kind })
	if at < 0 {
		l.lines = append(l.lines, line{kind: kind, text: text})
		return true
	}

	l.lines[at].more++
	return true
}

// Messages returns the warnings, the oldest first, each text once. Several warnings of the same kind become one: the
// first, with the number of others.
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
