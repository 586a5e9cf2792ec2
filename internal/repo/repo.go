// Package repo is the format of a remote: an encrypted repository in an object
// store. FORMAT.md describes it byte by byte.
//
// # Layout
//
//	config                        which repository it is; all keys, wrapped for each slot
//	heads/<keyed hash of a name>  one volume or golden: its points; compare-and-swap
//	points/<id>                   older points of one volume
//	manifests/<id>                one point: its pages, the segments that it needs
//	segments/<session>/<n>        frames: data and pages
//	sessions/<id>                 who is at work, what must stay
//	prune/seen                    what the last prune saw
//
// # Order
//
// Session, then segments, then manifest, then head: nothing durable names what was
// not uploaded. Deleting goes the other way: out of the head, then look at the
// sessions, then manifests and segments.
package repo
