package client

import (
	"context"
	"io"
	"net/http"
	"net/url"
	"strconv"
)

// Goldens lists goldens, each with its current generation.
func (c *Client) Goldens(ctx context.Context) ([]Golden, error) {
	return list[Golden](ctx, c, "/v1/goldens", nil)
}

// Golden shows a golden with its generations.
func (c *Client) Golden(ctx context.Context, name string) (*Details, error) {
	return call[Details](ctx, c, request{method: http.MethodGet, path: path("goldens", name)})
}

// SetGolden changes properties of a golden. ifMatch is as in Destroy.
func (c *Client) SetGolden(ctx context.Context, name string, q GoldenProperties, ifMatch string) (*GoldenSet, error) {
	return call[GoldenSet](ctx, c, request{method: http.MethodPatch, path: path("goldens", name), body: q,
		header: headers("", ifMatch)})
}

// RemoveGolden removes a golden with all its generations. ifMatch is as in Destroy.
func (c *Client) RemoveGolden(ctx context.Context, name, ifMatch string) error {
	_, err := call[nothing](ctx, c, request{method: http.MethodDelete, path: path("goldens", name),
		header: headers("", ifMatch)})
	return err
}

// RemoveGeneration removes a generation that is not the current one.
func (c *Client) RemoveGeneration(ctx context.Context, golden string, number int) error {
	_, err := call[nothing](ctx, c, request{method: http.MethodDelete,
		path: path("goldens", golden, "generations", strconv.Itoa(number))})
	return err
}

// ImportOptions are options of Import.
type ImportOptions struct {
	Update    bool   // make the next generation of a golden that exists
	FS        string // native, ext4, xfs; "": as the driver prefers
	SizeBytes int64  // 0: large enough
	Keep      int    // from now on, keep this many of the newest generations; 0: as before
	Overlay   string // from now on, whether clones are overlays: never, default, allowed
	Preset    string
	Labels    []string // KEY=VALUE

	Key string // Idempotency-Key; "": none
}

// Import makes a golden from a tar archive, plain or compressed by gzip or zstd. It returns when the golden is durable.
func (c *Client) Import(ctx context.Context, golden string, archive io.Reader, o ImportOptions) (*Imported, error) {
	q := url.Values{}
	set := func(key, value string) {
		if value != "" {
			q.Set(key, value)
		}
	}
	number := func(key string, n int64) {
		if n != 0 {
			q.Set(key, strconv.FormatInt(n, 10))
		}
	}
	if o.Update {
		q.Set("update", "true")
	}
	set("fs", o.FS)
	set("overlay", o.Overlay)
	set("preset", o.Preset)
	number("size_bytes", o.SizeBytes)
	number("keep", int64(o.Keep))
	if len(o.Labels) > 0 {
		q["label"] = o.Labels
	}
	return call[Imported](ctx, c, request{method: http.MethodPost, path: path("goldens", golden, "import"), query: q,
		body: archive, contentType: "application/x-tar", header: headers(o.Key, "")})
}
