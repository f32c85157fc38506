module github.com/malachilog/malachi/tools

go 1.27.0
