-- name: lock_keys
-- Blocks other writers of the keys until the transaction ends; readers are not blocked.
lock table signing_key in share row exclusive mode;

-- name: list_keys
-- Every stored key; a single row without a key if none is stored.
select k.kid, k.secret, k.is_current, k.installed_at, k.expires_at, c.now,
       k.is_current or coalesce(k.expires_at >= c.now, false) as verifies
  from (select ff_now() as now) c left join signing_key k on true
 order by k.installed_at, k.kid;

-- name: list_kids
-- The names of the keys that sign or still verify.
select k.kid, k.is_current, k.expires_at
  from (select ff_now() as now) c join signing_key k on k.is_current or k.expires_at >= c.now
 order by k.expires_at, k.kid;

-- name: insert_key
-- Installs the key that signs from now on.
insert into signing_key (kid, secret, is_current, installed_at) values (:kid, :secret, true, :now);

-- name: set_secret
-- Replaces the stored form of a key's secret.
update signing_key set secret = :secret where kid = :kid;

-- name: retire_key
-- Retires a key: it no longer signs, and verifies until :expires_at.
update signing_key set is_current = false, expires_at = :expires_at where kid = :kid;

-- name: take_expired_signing_keys
-- Deletes the keys that no longer verify; returns their names.
delete from signing_key
 where not is_current and (expires_at is null or expires_at <= 0 or expires_at < :now)
returning kid;

-- name: read_key
-- The secret of a key, and whether its signatures are still valid.
select k.kid, k.secret, k.installed_at, k.is_current or coalesce(k.expires_at >= c.now, false) as verifies
  from (select ff_now() as now) c join signing_key k on k.kid = :kid;
