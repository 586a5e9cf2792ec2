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
//	packs/<session>/<n>           frames that were moved out of segments
//	moved/<session>/<n>           which packs count, and what each holds
//	sessions/<id>                 who is at work, what must stay
//	prune/seen                    what the last prune saw
//
// # Order
//
// Session, then segments, then manifest, then head: nothing durable names what was
// not uploaded. Deleting goes the other way: out of the head, then look at the
// sessions, then manifests and segments. Moving is both: packs, then their table, and
// then what they were copied from goes.
package repo
