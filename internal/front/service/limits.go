package service

import (
	"context"
	"net"
	"net/http"
	"net/netip"
	"sync"
	"time"
)

// Limits of what one user without root's rights may have at a time, so that others can go on working. Tests use less.
var (
	maxConnectionsOfUser = 200 // each needs a file descriptor, of which the service has a limited number
	maxDiffsOfUser       = 4   // each copies and mounts two volumes, and keeps its result in memory
)

// Limits of connections over TCP that have not sent a valid token yet. They end soon: see newServer.
var (
	maxStrangers       = 512
	maxStrangersOfHost = 128 // from one address
)

// Limits of connections whose users are not known: those for metrics only, and those of browsers.
const (
	maxScrapers = 100
	maxBrowsers = 500
)

// counts counts what users or hosts have at the moment.
type counts[K comparable] struct {
	mu sync.Mutex
	n  map[K]int
}

// add reports whether somebody may have one more of something, and counts that. The caller calls end.
func (c *counts[K]) add(who K, most int) (end func(), ok bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.n == nil {
		c.n = map[K]int{}
	}
	if c.n[who] >= most {
		return nil, false
	}
	c.n[who]++
	return func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		if c.n[who]--; c.n[who] == 0 {
			delete(c.n, who)
		}
	}, true
}

// strangers counts the connections over TCP without a valid token.
type strangers struct {
	all     counts[struct{}]
	of      counts[netip.Addr]
	mu      sync.Mutex
	refused time.Time // when the log said so last
}

// add counts a connection until end is called. ok is false if there are too many, of all hosts or of this one.
func (s *strangers) add(host netip.Addr) (end func(), ok bool) {
	endHost, ok := s.of.add(host, maxStrangersOfHost)
	if !ok {
		return nil, false
	}
	endAll, ok := s.all.add(struct{}{}, maxStrangers)
	if !ok {
		endHost()
		return nil, false
	}
	return sync.OnceFunc(func() { endHost(); endAll() }), true
}

// logEvery is the shortest time between two messages about connections that were refused.
const logEvery = time.Minute

// shallLog reports whether it is time to log that connections are refused.
func (s *strangers) shallLog() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if time.Since(s.refused) < logEvery {
		return false
	}
	s.refused = time.Now()
	return true
}

// trustedKey has, in the context of a connection, what to call when a valid token has come.
type trustedKey struct{}

// admitStranger counts a connection over TCP until it has sent a valid token. ok is false if there are too many.
func (s *Service) admitStranger(ctx context.Context, c net.Conn) (_ context.Context, end func(), ok bool) {
	at, _ := netip.ParseAddrPort(c.RemoteAddr().String()) // of TCP, so that it is one
	end, ok = s.strangers.add(at.Addr())
	if !ok {
		if s.strangers.shallLog() {
			s.Log("closing connections, such as one from %s: there are too many without a valid token (at most %d from one "+
				"address, and %d in all)", at.Addr(), maxStrangersOfHost, maxStrangers)
		}
		return ctx, nil, false
	}
	return context.WithValue(ctx, trustedKey{}, end), end, true
}

// limitConnections makes a server close connections at once that are too many for their user. It must be set up before
// the server begins.
func (s *Service) limitConnections(server *http.Server, l *Listener) {
	var unknown counts[struct{}] // of a listener whose users are not known
	var open sync.Map            // of net.Conn to func()

	// Count each connection, of whoever needs to be counted.
	server.ConnContext = func(ctx context.Context, c net.Conn) context.Context {
		ctx = withPeer(ctx, c)
		who, known := ctx.Value(peerKey{}).(Caller)
		var end func()
		var ok bool
		switch {
		case l.metricsOnly:
			end, ok = unknown.add(struct{}{}, maxScrapers)
		case l.web:
			end, ok = unknown.add(struct{}{}, maxBrowsers)
		case !l.local:
			ctx, end, ok = s.admitStranger(ctx, c)
		case !known || who.trusted():
			return ctx
		default:
			end, ok = s.connections.add(who.UID, maxConnectionsOfUser)
		}

		if ok {
			open.Store(c, end)
		} else {
			_ = c.Close()
		}
		return ctx
	}

	// Until it is closed.
	server.ConnState = func(c net.Conn, state http.ConnState) {
		if state != http.StateClosed && state != http.StateHijacked {
			return
		}
		if end, ok := open.LoadAndDelete(c); ok {
			end.(func())()
		}
	}
}
