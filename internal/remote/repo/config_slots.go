package repo

import (
	"context"

	"pando/internal/base/errs"
)

// ConfigSlots lists the slots in raw, an earlier [Repo.Config], in the order in which they were added. It asks no
// store. Damaged, TooNew; Permission if none of the secrets opens raw.
func ConfigSlots(ctx context.Context, raw []byte, secrets ...Secret) ([]SlotInfo, error) {
	k, err := unlock(ctx, raw, secrets)
	if err != nil {
		return nil, errs.Wrap("list keys", "", err)
	}

	defer k.wipe()

	var infos []SlotInfo
	for _, s := range k.slots {
		infos = append(infos, s.SlotInfo)
	}

	return infos, nil
}
