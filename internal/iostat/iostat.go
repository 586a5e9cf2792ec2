// Package iostat measures what paths and volumes write at each layer, and what of it
// reaches the disks.
package iostat
