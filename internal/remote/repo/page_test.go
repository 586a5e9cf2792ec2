package repo

import "pando/internal/base/errs"

// DecodePage decodes the output of EncodePage. Damaged, TooNew. The pieces are in order,
// in one region, and within the limits of the format; the caller must check that they are
// inside their volume.
func DecodePage(b []byte) ([]Piece, error) {
	_, pieces, err := decodePage(b)
	return pieces, errs.Wrap("read page", "", err)
}
