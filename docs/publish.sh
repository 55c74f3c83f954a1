#!/usr/bin/env bash
# Puts a site into a folder of the branch gh-pages, beside those of other versions, and pushes it:
#
#     bash docs/publish.sh docs/_build/html v1.0.0
set -euo pipefail
site=$(realpath "$1")
version=$2
pages=$(mktemp -d)
trap 'git worktree remove --force "$pages"' EXIT

git worktree add --quiet --detach "$pages"
if git -C "$pages" fetch --quiet --depth 1 origin gh-pages 2>/dev/null; then
    git -C "$pages" checkout --quiet --detach FETCH_HEAD
else
    git -C "$pages" checkout --quiet --orphan gh-pages
    git -C "$pages" rm --quiet -r --force --ignore-unmatch .
fi
cd "$pages"
rm -rf "$version"
cp -r "$site" "$version"
touch .nojekyll # or Pages leaves out folders such as _static
{
    printf '<!doctype html>\n<meta charset="utf-8">\n<title>Versions</title>\n<ul>\n'
    printf '%s\n' */ | sort --reverse --version-sort | sed 's#.*#<li><a href="&">&</a></li>#; s#/</a>#</a>#'
    printf '</ul>\n'
} >index.html
git add --all
! git diff --cached --quiet || exit 0
git -c user.name=docs -c user.email=docs@localhost commit --quiet --message "Documentation of $version"
git push --quiet origin HEAD:refs/heads/gh-pages
