package web

import (
	"context"
	"net/http"
	"net/url"
	"strconv"
	"strings"

	"pando/client"
)

// goldenActions are those of a golden.
func goldenActions(s subject) []action {
	return []action{cloneAction(nil), keepAction(s), labelAction(forRoot), renameAction(forRoot(nil)),
		removeGoldenAction()}
}

// generationActions are those of a generation.
func generationActions(subject) []action {
	return []action{cloneAction(nil), pinAction(forRoot), unpinAction(forRoot), removeGenerationAction()}
}

func keepAction(s subject) action {
	keep := ""
	if s.details != nil {
		keep = strconv.Itoa(s.details.Keep)
	}
	return action{Name: "keep", Title: "Keep", why: forRoot(nil),
		Fields: []field{{Name: "keep", Title: "Generations", Value: keep, Hint: "0: all", Required: true}},
		do: func(ctx context.Context, c *client.Client, ref string, q url.Values) (string, error) {
			n, err := strconv.Atoi(q.Get("keep"))
			if err != nil {
				return "", invalid("the number of generations is not a number", "use for example 3, or 0 for all")
			}
			set, err := c.SetGolden(ctx, ref, client.GoldenProperties{Keep: &n}, "")
			if err != nil {
				return "", err
			}
			return "removed " + plural(len(set.Removed), "generation"), nil
		}}
}

// invalid is the error of a form that cannot be understood.
func invalid(detail, hint string) error {
	return &client.Error{Status: http.StatusBadRequest, Kind: client.Invalid, Detail: detail, Hint: hint}
}

func removeGoldenAction() action {
	return action{Name: "remove-golden", Title: "Remove", Danger: true,
		why: forRoot(func(s subject) string {
			if s.details == nil {
				return ""
			}
			for _, g := range s.details.Generations {
				if g.PinnedUntil != nil {
					return "Generation " + strconv.Itoa(g.Generation) + " is pinned: unpin it first."
				}
			}
			return ""
		}),
		do: func(ctx context.Context, c *client.Client, ref string, _ url.Values) (string, error) {
			return "removed", c.RemoveGolden(ctx, ref, "")
		}}
}

func removeGenerationAction() action {
	return action{Name: "remove-generation", Title: "Remove", Danger: true,
		why: forRoot(func(s subject) string {
			if s.State == "current" {
				return "It is the current generation: publish another one first, or remove the golden."
			}
			return isPinned(s)
		}),
		do: func(ctx context.Context, c *client.Client, ref string, _ url.Values) (string, error) {
			golden, text, _ := strings.Cut(ref, "@")
			number, _ := strconv.Atoi(text) // 0 is refused
			return "removed", c.RemoveGeneration(ctx, golden, number)
		}}
}

// poolActions are those of the pool.
func poolActions(subject) []action {
	begin := func(name, title string, fn func(context.Context, *client.Client) (*client.Operation, error)) action {
		return action{Name: name, Title: title, why: forRoot(nil),
			do: func(ctx context.Context, c *client.Client, _ string, _ url.Values) (string, error) {
				return started(fn(ctx, c))
			}}
	}

	return []action{
		begin("gc", "Clean up", func(ctx context.Context, c *client.Client) (*client.Operation, error) { return c.GC(ctx) }),
		begin("fsck", "Check", func(ctx context.Context, c *client.Client) (*client.Operation, error) {
			return c.Fsck(ctx, nil, false)
		}),
		begin("doctor", "Examine the host", func(ctx context.Context, c *client.Client) (*client.Operation, error) {
			return c.Doctor(ctx)
		}),
	}
}

// cancelAction cancels an operation.
func cancelAction() action {
	return action{Name: "cancel", Title: "Cancel",
		do: func(ctx context.Context, c *client.Client, ref string, _ url.Values) (string, error) {
			return "it is being canceled, and undoes what it did", c.Cancel(ctx, ref)
		}}
}
