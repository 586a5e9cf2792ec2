package repo

import (
	"bytes"
	"context"
	"fmt"
	"iter"
	"maps"
	"slices"
	"strings"
	"sync"

	"pando/internal/base/errs"
	"pando/internal/remote/objstore"
)

// memory is a store in memory.
type memory struct {
	mu      sync.Mutex
	objects map[string]object
	writes  int
}

type object struct {
	data    []byte
	version objstore.Version
}

func newMemory() *memory { return &memory{objects: map[string]object{}} }

func (m *memory) Put(ctx context.Context, key string, data []byte, c objstore.Condition) (objstore.Version, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if err := ctx.Err(); err != nil {
		return "", err
	}
	was, there := m.objects[key]
	if (c.Absent() && there) || (c.Version() != "" && was.version != c.Version()) {
		return "", errs.New(errs.Conflict, "put", key, "the condition does not hold")
	}
	m.writes++
	v := objstore.Version(fmt.Sprint("v", m.writes))
	m.objects[key] = object{bytes.Clone(data), v}
	return v, nil
}

func (m *memory) Get(ctx context.Context, key string, offset, length int64) ([]byte, objstore.Info, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if err := ctx.Err(); err != nil {
		return nil, objstore.Info{}, err
	}
	o, there := m.objects[key]
	if !there {
		return nil, objstore.Info{}, errs.New(errs.NotFound, "get", key, "it is not there")
	}
	data := bytes.Clone(o.data)
	size := int64(len(data))
	offset = min(offset, size)
	end := size
	if length >= 0 {
		end = min(offset+length, size)
	}
	return data[offset:end:end], objstore.Info{Key: key, Bytes: size, Version: o.version}, nil
}

func (m *memory) Stat(ctx context.Context, key string) (objstore.Info, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if err := ctx.Err(); err != nil {
		return objstore.Info{}, err
	}
	o, there := m.objects[key]
	if !there {
		return objstore.Info{}, errs.New(errs.NotFound, "stat", key, "it is not there")
	}
	return objstore.Info{Key: key, Bytes: int64(len(o.data)), Version: o.version}, nil
}

func (m *memory) List(ctx context.Context, prefix string) iter.Seq2[objstore.Info, error] {
	return func(yield func(objstore.Info, error) bool) {
		m.mu.Lock()
		var all []objstore.Info
		for _, key := range slices.Sorted(maps.Keys(m.objects)) {
			if strings.HasPrefix(key, prefix) {
				o := m.objects[key]
				all = append(all, objstore.Info{Key: key, Bytes: int64(len(o.data)), Version: o.version})
			}
		}
		m.mu.Unlock()
		if err := ctx.Err(); err != nil {
			yield(objstore.Info{}, err)
			return
		}
		for _, i := range all {
			if !yield(i, nil) {
				return
			}
		}
	}
}

func (m *memory) Delete(ctx context.Context, key string) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if err := ctx.Err(); err != nil {
		return err
	}
	delete(m.objects, key)
	return nil
}

func (m *memory) String() string { return "memory:" }

// keys are the keys of all objects.
func (m *memory) keys() []string {
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.Sorted(maps.Keys(m.objects))
}

// set puts what an operator of the store puts.
func (m *memory) set(key string, data []byte) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.writes++
	m.objects[key] = object{data, objstore.Version(fmt.Sprint("v", m.writes))}
}

func (m *memory) data(key string) []byte {
	m.mu.Lock()
	defer m.mu.Unlock()
	return bytes.Clone(m.objects[key].data)
}
