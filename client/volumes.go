package client

import (
	"context"
	"io"
	"iter"
	"net/http"
	"net/url"
	"strconv"
)

// Service returns what the service says about itself.
func (c *Client) Service(ctx context.Context) (*Service, error) {
	return call[Service](ctx, c, request{method: http.MethodGet, path: "/v1/service"})
}

// Metrics returns the metrics of the pool and of the service, in the text format of Prometheus.
func (c *Client) Metrics(ctx context.Context) (string, error) {
	resp, err := c.send(ctx, request{method: http.MethodGet, path: "/metrics"})
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	return string(b), err
}

// Pool returns the pool and its space.
func (c *Client) Pool(ctx context.Context) (*Pool, error) {
	return call[Pool](ctx, c, request{method: http.MethodGet, path: "/v1/pool"})
}

// VolumeFilter selects volumes of a list.
type VolumeFilter struct {
	Labels []string // KEY or KEY=VALUE, a glob
	Golden string   // only volumes that descend from it
	Page   int      // volumes that are fetched at a time; 0: 1000
}

// pageMost is the length of the longest page.
const pageMost = 1000

// Volumes lists volumes in the order of their names, page by page. After an error it ends.
func (c *Client) Volumes(ctx context.Context, f VolumeFilter) iter.Seq2[Object, error] {
	type page struct {
		Items []Object `json:"items"`
		Next  string   `json:"next"`
	}
	if f.Page == 0 {
		f.Page = pageMost
	}

	return func(yield func(Object, error) bool) {
		q := url.Values{"limit": {strconv.Itoa(f.Page)}}
		if len(f.Labels) > 0 {
			q["label"] = f.Labels
		}
		if f.Golden != "" {
			q.Set("golden", f.Golden)
		}
		for {
			p, err := call[page](ctx, c, request{method: http.MethodGet, path: "/v1/volumes", query: q})
			if err != nil {
				yield(Object{}, err)
				return
			}
			for _, v := range p.Items {
				if !yield(v, nil) {
					return
				}
			}
			if p.Next == "" {
				return
			}
			q.Set("after", p.Next)
		}
	}
}

// Clone creates a volume from a golden, a snapshot or a volume.
func (c *Client) Clone(ctx context.Context, q CloneRequest) (*Object, error) {
	return call[Object](ctx, c, request{method: http.MethodPost, path: "/v1/volumes", body: q, header: headers(q.Key, "")})
}

// Fork creates a volume from another one, which may be in use.
func (c *Client) Fork(ctx context.Context, volume string, q ForkRequest) (*Object, error) {
	return call[Object](ctx, c, request{method: http.MethodPost, path: path("volumes", volume, "fork"), body: q,
		header: headers(q.Key, "")})
}

// Volume shows a volume with its snapshots, measured now.
func (c *Client) Volume(ctx context.Context, name string) (*Details, error) {
	return call[Details](ctx, c, request{method: http.MethodGet, path: path("volumes", name)})
}

// Mount mounts a volume.
func (c *Client) Mount(ctx context.Context, volume string, q MountRequest) (*Object, error) {
	return call[Object](ctx, c, request{method: http.MethodPost, path: path("volumes", volume, "mount"), body: q})
}

// Unmount unmounts a volume.
func (c *Client) Unmount(ctx context.Context, volume string) (*Object, error) {
	return call[Object](ctx, c, request{method: http.MethodPost, path: path("volumes", volume, "unmount")})
}

// Rewind restores a volume to one of its snapshots. With detach, it may be mounted.
func (c *Client) Rewind(ctx context.Context, volume, snapshot string, detach bool) (*Rewound, error) {
	return call[Rewound](ctx, c, request{method: http.MethodPost, path: path("volumes", volume, "rewind"),
		body: map[string]any{"snapshot": snapshot, "detach": detach}})
}

// Resize enlarges a volume and its filesystem.
func (c *Client) Resize(ctx context.Context, volume string, bytes int64) (*Object, error) {
	return call[Object](ctx, c, request{method: http.MethodPost, path: path("volumes", volume, "resize"),
		body: map[string]any{"size_bytes": bytes}})
}

// Rename gives a volume, snapshot or golden another name. ifMatch is as in Destroy.
func (c *Client) Rename(ctx context.Context, ref, name, ifMatch string) (*Object, error) {
	return call[Object](ctx, c, request{method: http.MethodPost, path: "/v1/rename",
		body: map[string]any{"ref": ref, "name": name}, header: headers("", ifMatch)})
}

// Labels returns the labels of a volume, snapshot or golden.
func (c *Client) Labels(ctx context.Context, ref string) (map[string]string, error) {
	out, err := call[struct {
		Labels map[string]string `json:"labels"`
	}](ctx, c, request{method: http.MethodGet, path: path("labels", ref)})
	if err != nil {
		return nil, err
	}
	return out.Labels, nil
}

// SetLabels changes labels of a volume, snapshot or golden; others stay. ifMatch is as in Destroy.
func (c *Client) SetLabels(
	ctx context.Context, ref string, set map[string]string, remove []string, ifMatch string,
) (*Object, error) {
	body := map[string]any{}
	if len(set) > 0 {
		body["set"] = set
	}
	if len(remove) > 0 {
		body["remove"] = remove
	}
	return call[Object](ctx, c, request{method: http.MethodPatch, path: path("labels", ref), body: body,
		header: headers("", ifMatch)})
}

// Pin keeps an object from being destroyed, for some seconds; 0: until it is unpinned.
func (c *Client) Pin(ctx context.Context, ref string, seconds float64) (*Object, error) {
	return call[Object](ctx, c, request{method: http.MethodPut, path: path("pins", ref),
		body: map[string]any{"seconds": seconds}})
}

// Unpin undoes Pin.
func (c *Client) Unpin(ctx context.Context, ref string) (*Object, error) {
	return call[Object](ctx, c, request{method: http.MethodDelete, path: path("pins", ref)})
}

// SetTTL lets a volume expire after some seconds from now on, or never if that is 0.
func (c *Client) SetTTL(ctx context.Context, volume string, seconds float64) (*Object, error) {
	return call[Object](ctx, c, request{method: http.MethodPut, path: path("volumes", volume, "ttl"),
		body: map[string]any{"seconds": seconds}})
}

// Snapshots lists the snapshots of a volume, the oldest first.
func (c *Client) Snapshots(ctx context.Context, volume string) ([]Object, error) {
	return list[Object](ctx, c, path("volumes", volume, "snapshots"), nil)
}

// Snapshot takes a snapshot of a volume, which may be in use.
func (c *Client) Snapshot(ctx context.Context, volume string, q SnapshotRequest) (*Object, error) {
	return call[Object](ctx, c, request{method: http.MethodPost, path: path("volumes", volume, "snapshots"), body: q,
		header: headers(q.Key, "")})
}

// ShowSnapshot shows a snapshot, measured now.
func (c *Client) ShowSnapshot(ctx context.Context, volume, snapshot string) (*Details, error) {
	return call[Details](ctx, c, request{method: http.MethodGet, path: path("volumes", volume, "snapshots", snapshot)})
}

// SnapshotGroup takes snapshots of several volumes at one point in time.
func (c *Client) SnapshotGroup(ctx context.Context, volumes []string, q SnapshotRequest) (*SnapshotGroup, error) {
	body := struct {
		SnapshotRequest
		Volumes []string `json:"volumes"`
	}{q, volumes}
	return call[SnapshotGroup](ctx, c, request{method: http.MethodPost, path: "/v1/snapshot-groups", body: body,
		header: headers(q.Key, "")})
}

// Diff lists what differs between two volumes, snapshots or generations.
func (c *Client) Diff(ctx context.Context, a, b string) (*Difference, error) {
	return call[Difference](ctx, c, request{method: http.MethodGet, path: "/v1/diff",
		query: url.Values{"a": {a}, "b": {b}}})
}

// Export returns the files of an object as an archive (tar, tar.zst), or its image (raw, qcow2). The caller closes it.
// A read fails if the export does.
func (c *Client) Export(ctx context.Context, ref, format string) (io.ReadCloser, error) {
	resp, err := c.send(ctx, request{method: http.MethodGet, path: path("exports", ref),
		query: url.Values{"format": {format}}})
	if err != nil {
		return nil, err
	}
	return resp.Body, nil
}

// list returns the items of a list.
func list[T any](ctx context.Context, c *Client, path string, query url.Values) ([]T, error) {
	out, err := call[struct {
		Items []T `json:"items"`
	}](ctx, c, request{method: http.MethodGet, path: path, query: query})
	if err != nil {
		return nil, err
	}
	return out.Items, nil
}
