package web

import (
	"encoding/json"
	"net/http"
	"net/url"
	"strconv"

	"pando/client"
)

// ask sends a request that reads, for which the client has no method.
func ask[T any](v *visit, path string, q url.Values) (out T, err error) {
	resp, err := v.c.Do(v.Context(), client.Request{Method: http.MethodGet, Path: path, Query: q})
	if err != nil {
		return out, err
	}
	defer resp.Body.Close()
	return out, json.NewDecoder(resp.Body).Decode(&out)
}

// items is an answer with a list.
type items[T any] struct {
	Items []T    `json:"items"`
	Next  string `json:"next"`
	More  bool   `json:"more"`
}

// lineageSum is a sum of GET /v1/lineage.
type lineageSum struct {
	Golden         string `json:"golden"`
	Generation     int    `json:"generation"`
	Kind           string `json:"kind"`
	Objects        int    `json:"objects"`
	LogicalBytes   int64  `json:"logical_bytes"`
	ExclusiveBytes int64  `json:"exclusive_bytes"`
	SharedBytes    int64  `json:"shared_bytes"`
}

func (v *visit) lineageSums() ([]lineageSum, error) {
	all, err := ask[items[lineageSum]](v, "/v1/lineage", nil)
	return all.Items, err
}

// volumePage asks for a page of volumes.
func (v *visit) volumePage(q url.Values, limit int) (items[client.Object], error) {
	q.Set("limit", strconv.Itoa(limit))
	return ask[items[client.Object]](v, "/v1/volumes", q)
}

// mayChange returns why the user cannot change a volume, or a snapshot of it; "": the user can.
func (v *visit) mayChange(o client.Object) string {
	if v.who.AllRights || o.Owner != nil && o.Owner.UID == v.session.caller.UID {
		return ""
	}
	return "It belongs to somebody else: only its owner and root can change it."
}

// rootOnly returns why the user cannot do what only root may.
func (v *visit) rootOnly() string {
	if v.who.AllRights {
		return ""
	}
	return "Only root can do this."
}
