// Package repo implements the format of a remote: an encrypted repository in an
// object store. FORMAT.md describes it byte by byte.
//
// # Layout
//
//	config                        ID of the repository; all keys, wrapped for each slot
//	heads/<keyed hash of a name>  one volume or golden: its points; compare-and-swap
//	points/<id>                   older points of one volume
//	manifests/<id>                one point, and the root of its map
//	segments/<session>/<n>        frames: data, and nodes of maps
//	packs/<session>/<n>           frames moved out of segments
//	moved/<session>/<n>           the packs that are valid, and the contents of each
//	sessions/<id>                 running operations, and the manifests they pin
//	prune/seen                    the sessions that the last prune saw
//
// # Order
//
// A push writes its session, then segments, then the manifest, then the head: nothing
// durable names an object that was not uploaded. Deletion runs in the opposite order:
// it edits the head, then checks the sessions, then removes manifests and segments.
// Moving frames combines both: it writes packs, then their table, and then removes
// the objects that the frames were copied from.
package repo
